"""`python -m verl_ext.health RUN_DIR` on run directories of known content."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers.health_curves import write_checkpoint, write_run
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.health.__main__ import main
from verl_ext.metrics.run_record import RunRecord


def change_config(run_dir: Path, key: str, value: Any) -> None:
    config = OmegaConf.load(run_dir / "config.yaml")
    OmegaConf.update(config, key, value)
    OmegaConf.save(config, run_dir / "config.yaml")


def look(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """Exit code and what is said of each point and rule: level by text."""
    code = main([str(run_dir), "--json"])
    content = json.loads(capsys.readouterr().out)
    points = {point["text"]: point["level"] for listed in content["checklists"].values() for point in listed}
    return code, {**points, **{each["rule"]: each["level"] for each in content["rules"]}}


def test_a_healthy_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    code, told = look(run_dir, capsys)
    assert code == 0 and set(told.values()) == {"ok", None}
    for point in ("train/loss falls", "train/lr(1e-3) follows its schedule", "all steps are done"):
        assert told[point] == "ok"
    assert main([str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "After 100 steps" in shown and "At every checkpoint" in shown and "At the end" in shown
    assert "p/e (sft), finished, step 300" in shown and "too little to judge" in shown


def test_an_alarm_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = look(write_run(tmp_path, "exploding gradients"), capsys)
    assert code == 1 and told["grad_norm_exploding"] == "alarm"
    assert told["train/grad_norm is in range"] == "ok"  # the first hundred steps were well


def test_what_is_wrong_with_the_files_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run", "failed", "rank 1 was killed: NCCL timeout")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("200")
    write_checkpoint(run_dir, 200)
    (run_dir / "global_step_300/huggingface/model.safetensors").write_bytes(b"x")
    code, told = look(run_dir, capsys)
    assert code == 1
    assert told["every checkpoint is complete, huggingface/ too"] == "alarm"
    assert told["the expected checkpoints are there"] == "alarm"
    assert told["all steps are done"] == "alarm"
    assert told["no NCCL timeout, no lack of memory"] == "warning"
    assert told["latest_checkpointed_iteration.txt names the newest"] == "ok"  # of those that are complete


def test_a_tracker_that_lags_is_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    write_checkpoint(run_dir, 200)
    (run_dir / "latest_checkpointed_iteration.txt").write_text("200")
    code, told = look(run_dir, capsys)
    assert code == 0 and told["latest_checkpointed_iteration.txt names the newest"] == "warning"


def test_a_run_that_says_nothing_any_more_is_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run", "running", "")
    code, told = look(run_dir, capsys)
    assert code == 0 and told["the run is alive"] == "ok"
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "time": row["time"] - 3600}) + "\n" for row in rows))
    code, told = look(run_dir, capsys)
    assert code == 1 and told["the run is alive"] == "alarm"


def test_what_the_disk_lacks_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    (run_dir / "latest_checkpointed_iteration.txt").unlink()
    write_checkpoint(run_dir, 200)
    large = run_dir / "global_step_200/huggingface/model.safetensors"
    large.write_bytes(b"x" * 640)
    (run_dir / "global_step_200/manifest.json").write_text(
        Manifest(200, 1, "", {"huggingface/model.safetensors": {"bytes": 640}}).to_json()
    )
    code, told = look(run_dir, capsys)
    assert code == 0 and told["latest_checkpointed_iteration.txt names the newest"] == "warning"
    assert told["the sizes of the checkpoints are alike"] == "notice"
    shutil.rmtree(run_dir / "global_step_300")
    code, told = look(run_dir, capsys)
    assert code == 1 and told["the expected checkpoints are there"] == "alarm"
    shutil.rmtree(run_dir / "global_step_200")
    code, told = look(run_dir, capsys)
    assert code == 1 and told["the expected checkpoints are there"] == "alarm"
    assert (
        told["the sizes of the checkpoints are alike"] is told["every checkpoint is complete, huggingface/ too"] is None
    )


def test_thresholds_are_those_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    config = OmegaConf.load(run_dir / "config.yaml")
    config.health.limits.initial_loss_max = 1.0
    OmegaConf.save(config, run_dir / "config.yaml")
    assert look(run_dir, capsys)[1]["initial_loss"] == "warning"
    config.health.limits = {"of_another_version": 1}
    OmegaConf.save(config, run_dir / "config.yaml")
    assert refused(run_dir, capsys).startswith("error: health.limits of config.yaml is of another version")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run.json" in refused(tmp_path, capsys)
    run_dir = write_run(tmp_path, "a textbook run")
    (run_dir / "config.yaml").write_text("- a list")
    assert "not the configuration of a run" in refused(run_dir, capsys)
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2 and main(["--rules"]) == 0
    assert "overfitting" in capsys.readouterr().out


def refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main([str(run_dir)])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("closed", "level"), [(["csv", "console", "wandb"], "ok"), (["csv", "console"], "warning"), (None, None)]
)
def test_the_record_says_whether_wandb_was_closed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: list[str] | None, level: str | None
) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    change_config(run_dir, "trainer.logger", ["console", "wandb"])
    if closed is not None:
        record = RunRecord(run_dir)
        record.start_attempt(first_step=300, world_size=1, total_steps=300)
        record.end_attempt("finished", 300, "all steps are done", closed)
    assert look(run_dir, capsys)[1]["the W&B run is closed"] == level
