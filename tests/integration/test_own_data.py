"""`bash run_sft.sh` on JSON and CSV files: converted once, and resumed on the same rows."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tests.helpers import ROOT
from tests.helpers.commands import script_run


def test_run_on_json_and_csv_resumes_on_same_rows(quickstart: Path, tmp_path: Path) -> None:
    rows = [{"instruction": f"Write f{i}.", "input": "", "output": f"def f{i}(): pass"} for i in range(40)]
    rows[0]["input"] = str(tmp_path)  # files of other test sessions have other digests
    (tmp_path / "mine.json").write_text(json.dumps(rows))
    (tmp_path / "more.csv").write_text("prompt,response\n" + "".join(f"Write g{i}.,g{i}\n" for i in range(10)))
    words = (
        *("prepare=[]", f"model.partial_pretrain={quickstart}/model", f"trainer.default_local_dir={tmp_path}/run"),
        *("data.train_files=[mine.json,more.csv]", "data.train_batch_size=4", "optim.lr_scheduler=constant"),
        *("trainer.logger=[console]", "trainer.test_freq=2"),
    )
    run = script_run("run_sft.sh", 1, tmp_path / "run", *words, cwd=tmp_path)
    result = run.start("trainer.total_training_steps=2")
    converted = [ROOT / name for name in re.findall(r"(data/mine-\w+)/train\.parquet", result.stdout)]
    try:
        assert result.returncode == 0, result.stderr
        assert "Alpaca layout" in result.stdout and "prompt/response layout" in result.stdout
        counts = json.loads((converted[0] / "prepared.json").read_text())["counts"]
        assert (counts["train"], counts["val"]) == (49, 1)
        made = (converted[0] / "train.parquet").stat().st_mtime_ns
        output = run.finish("trainer.total_training_steps=4").stdout
        assert f"data/{converted[0].name}/train.parquet" in output and "global_step_2" in output
        assert (converted[0] / "train.parquet").stat().st_mtime_ns == made
        assert list(run.losses(2)) == [3, 4]
        assert {row["step"] for row in run.rows() if "val/loss" in row} == {0, 2, 4}
    finally:
        for path in converted:
            shutil.rmtree(path, ignore_errors=True)
