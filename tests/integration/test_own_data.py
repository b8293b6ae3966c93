"""`bash run_sft.sh` on JSON and CSV files: converted once, and resumed on the same rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.commands import TrainingRun, script_run


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A JSON list in Alpaca's layout and a CSV file of prompts and responses, whose conversion is removed again."""
    rows = [{"instruction": f"Write f{index}.", "input": "", "output": f"def f{index}(): pass"} for index in range(40)]
    (tmp_path / f"{tmp_path.name}.json").write_text(json.dumps(rows))
    (tmp_path / "more.csv").write_text("prompt,response\n" + "".join(f"Write g{i}.,g{i}\n" for i in range(10)))
    return tmp_path


def run_in(directory: Path, name: str, quickstart: Path) -> TrainingRun:
    run_dir = directory / name
    words = (
        *("prepare=[]", f"model.partial_pretrain={quickstart}/model", f"trainer.default_local_dir={run_dir}"),
        *(f"data.train_files=[{directory.name}.json,more.csv]", "data.train_batch_size=4"),
        *("optim.lr_scheduler=constant", "trainer.logger=[console]", "trainer.test_freq=2"),
    )
    return script_run("run_sft.sh", 1, run_dir, *words, cwd=directory)


def test_a_run_on_json_and_csv_resumes_on_the_same_rows(quickstart: Path, directory: Path) -> None:
    whole = run_in(directory, "whole", quickstart)
    output = whole.finish("trainer.total_training_steps=4").stdout
    [converted] = (ROOT / "data").glob(f"{directory.name}-*")
    try:
        assert "Alpaca layout" in output and "prompt/response layout" in output and f"data/{converted.name}" in output
        counts = json.loads((converted / "prepared.json").read_text())["counts"]
        assert (counts["train"], counts["val"]) == (49, 1)
        resumed = run_in(directory, "resumed", quickstart)
        outputs = [resumed.finish(f"trainer.total_training_steps={steps}").stdout for steps in (2, 4)]
        assert "global_step_2" in outputs[1] and not any("Preparing" in text for text in outputs)
        assert resumed.losses() == whole.losses() and len(whole.losses()) == 4
        assert {row["step"] for row in whole.rows() if "val/loss" in row} == {2, 4}
    finally:
        shutil.rmtree(converted)
