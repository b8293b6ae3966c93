"""`python -m verl_ext.health RUN_DIR` on run directories with known content."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.helpers import ROOT
from tests.helpers.health_curves import (
    CURVES,
    change_attempt,
    change_config,
    history_of,
    make_silent,
    view_of,
    write_checkpoint,
    write_run,
)
from verl_ext.checkpoint.manifest import Manifest
from verl_ext.config.schema import to_yaml
from verl_ext.health import checklist
from verl_ext.health.__main__ import main
from verl_ext.health.checklist import metric_trends
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import RunContext
from verl_ext.health.rule import HealthView, Level
from verl_ext.health.rules import RULES
from verl_ext.health.run_directory import RunDirectory, why_killed
from verl_ext.metrics import heartbeat
from verl_ext.metrics.run_record import RunRecord
from verl_ext.monitor.run_files import parse_rows
from verl_ext.processes import boot_id, pid_namespace, start_ticks
from verl_ext.trainer.stages import load_config


def run_health(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    """The exit code, and the level of each item and rule by its text, with the status."""
    code = main([str(run_dir), "--json"])
    content = json.loads(capsys.readouterr().out)
    items = {item["text"]: item["level"] for listed in content["checklists"].values() for item in listed}
    return code, {"status": content["status"], **items, **{each["rule"]: each["level"] for each in content["rules"]}}


def test_healthy_run_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    code, levels = run_health(run_dir, capsys)
    assert code == 0 and levels.pop("status") == "finished" and set(levels.values()) == {"ok", None}
    for point in ("train/loss falls", "train/lr(1e-3) follows its schedule", "all steps completed"):
        assert levels[point] == "ok"
    assert main([str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "After 100 steps" in shown and "At every checkpoint" in shown and "At the end" in shown
    assert "p/e (sft), finished, step 300" in shown and "not enough data" in shown


def test_alarm_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, levels = run_health(write_run(tmp_path, "exploding gradients"), capsys)
    assert code == 1 and levels["grad_norm_exploding"] == "alarm"
    assert levels["train/grad_norm is in range"] == "ok"  # the first hundred steps were normal


def test_flat_advantages_are_only_cause_of_zero_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "no groups")
    (run_dir / "config.yaml").write_text(to_yaml(load_config("grpo", ["trainer.logger=[console]"])))
    code, levels = run_health(run_dir, capsys)
    assert code == 1 and levels["advantages_flat"] == "alarm"
    assert levels["train/loss is not 0 throughout, and not extreme"] == levels["train/grad_norm is in range"] == "alarm"
    assert not {"loss_zero", "grad_norm_range", "grad_norm_vanishing"} & levels.keys()


def test_file_problems_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run", "failed", "rank 1 was killed: NCCL timeout")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("200")
    write_checkpoint(run_dir, 200)
    (run_dir / "global_step_300/huggingface/model.safetensors").write_bytes(b"x")
    _, levels = run_health(run_dir, capsys)
    assert levels["every checkpoint is complete, including huggingface/"] == "warning"  # the next start writes it
    assert levels["the expected checkpoints exist"] == "ok"
    (run_dir / "global_step_300/data.pt").write_bytes(b"x")
    code, levels = run_health(run_dir, capsys)
    assert code == 1
    assert levels["every checkpoint is complete, including huggingface/"] == "alarm"
    assert levels["the expected checkpoints exist"] == "alarm"
    assert levels["all steps completed"] == "alarm"
    assert levels["no NCCL errors, timeouts or out-of-memory errors"] == "warning"
    assert levels["latest_checkpointed_iteration.txt names the newest checkpoint"] == "ok"  # of those that are complete


def test_outdated_tracker_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    write_checkpoint(run_dir, 200)
    (run_dir / "latest_checkpointed_iteration.txt").write_text("200")
    code, levels = run_health(run_dir, capsys)
    assert code == 0 and levels["latest_checkpointed_iteration.txt names the newest checkpoint"] == "warning"


@pytest.fixture(scope="module")
def gone() -> int:
    """The PID of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


HERE = {"host": socket.gethostname(), "pid_namespace": pid_namespace()}


def test_silent_run_is_reported_as_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run", "running", "")
    code, levels = run_health(run_dir, capsys)
    assert code == 0 and levels["the run is alive"] == "ok" and levels["status"] == "running"
    make_silent(run_dir, 3600)
    code, levels = run_health(run_dir, capsys)
    assert code == 1 and levels["the run is alive"] == "alarm" and levels["status"] == "killed"
    assert main([str(run_dir)]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("p/e (sft), killed, step 300\n")
    assert "it has logged nothing for 36" in shown and "run the same command again" in shown


def test_silence_limit_grows_with_step_and_validation_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run", "running", "")
    make_silent(run_dir, 3600)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"step": 300, "attempt": 1, "time": time.time() - 3600, "time/val/step_s": 2000.0}) + "\n"
        )
    assert run_health(run_dir, capsys)[1]["status"] == "running"


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "killed"),
        ({"pid": os.getpid()}, "running"),
        ({"pid": os.getpid(), "pid_start_ticks": start_ticks(os.getpid())}, "running"),
        ({"pid": os.getpid(), "pid_start_ticks": 1}, "killed"),  # the PID was reused
        ({"host": "elsewhere"}, "running"),
        ({"boot_id": boot_id()}, "killed"),
        ({"boot_id": "another"}, "running"),  # a copy of this machine
        ({"pid_namespace": 1}, "running"),
        ({"pid_namespace": None}, "running"),
    ],
)
def test_run_without_live_process_is_reported_as_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: int, changed: dict[str, object], status: str
) -> None:
    run_dir = write_run(tmp_path, "a textbook run", "running", "")
    change_attempt(run_dir, pid=gone, **HERE)
    change_attempt(run_dir, **changed)
    code, levels = run_health(run_dir, capsys)
    assert (code, levels["status"]) == (int(status == "killed"), status)
    assert levels["the run is alive"] == ("alarm" if status == "killed" else "ok")


@pytest.mark.parametrize("status", ["running", "waiting"])
@pytest.mark.parametrize("beats", [True, False])
def test_command_waits_for_heartbeat_of_silent_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, beats: bool, status: str
) -> None:
    monkeypatch.setattr(heartbeat, "DEAD_AFTER_S", 0.4)
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.1)
    monkeypatch.setattr(heartbeat, "POLL_S", 0.05)
    run_dir = write_run(tmp_path, "a textbook run", "running", "")
    change_attempt(run_dir, host="elsewhere", heartbeat_s=10.0)
    if status == "waiting":
        RunRecord(run_dir).mark_waiting(launch={"heartbeat_s": 10.0})
    make_silent(run_dir, 3600)  # its ranks may hang
    (run_dir / "run.lock").touch()
    os.utime(run_dir / "run.lock", (1e9, 1e9))
    with heartbeat.send_heartbeats(run_dir) if beats else nullcontext():
        assert run_health(run_dir, capsys)[1]["status"] == (status if beats else "killed")


def test_finished_run_is_not_reported_as_killed(tmp_path: Path, capsys: pytest.CaptureFixture[str], gone: int) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    change_attempt(run_dir, pid=gone, **HERE)
    make_silent(run_dir, 3600)
    code, levels = run_health(run_dir, capsys)
    assert code == 0 and levels["status"] == "finished" and "the run is alive" not in levels


def test_new_attempt_records_its_process(tmp_path: Path) -> None:
    record = RunRecord(tmp_path)
    record.start_attempt(first_step=0, world_size=1, total_steps=3)
    run = record.read()
    assert run["attempts"][0].items() >= {"pid": os.getpid(), **HERE}.items()
    assert why_killed(tmp_path, run, 10.0, 600.0) is None
    assert why_killed(tmp_path, run, 900.0, 600.0) is None, "a first step may be slow"


@pytest.mark.parametrize(("newest", "level"), [(None, "warning"), (1, "ok"), (2, "warning")])
def test_missing_checkpoints_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], newest: int | None, level: str
) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    write_checkpoint(run_dir, 100)
    change_config(run_dir, "trainer.save_freq", 100)
    change_config(run_dir, "trainer.max_ckpt_to_keep", newest)
    assert run_health(run_dir, capsys)[1]["the expected checkpoints exist"] == level
    assert main([str(run_dir)]) == 0
    assert ("global_step_200 should be kept, too" in capsys.readouterr().out) == (level == "warning")
    write_checkpoint(run_dir, 200)
    assert run_health(run_dir, capsys)[1]["the expected checkpoints exist"] == "ok"


def test_checkpoints_before_last_attempt_are_not_expected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    change_config(run_dir, "trainer.save_freq", 100)
    change_attempt(run_dir, first_step=200)  # which may have had another save_freq before
    assert run_health(run_dir, capsys)[1]["the expected checkpoints exist"] == "ok"


@pytest.mark.parametrize(
    ("every", "deferred", "level"),
    [(None, (), "warning"), (200, (), "ok"), (100, (), "warning"), (None, ("huggingface",), "ok")],
)
def test_missing_exports_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], every: int | None, deferred: tuple[str, ...], level: str
) -> None:
    point = "every checkpoint is complete, including huggingface/"
    run_dir = write_run(tmp_path, "a textbook run")
    write_checkpoint(run_dir, 100)
    shutil.rmtree(run_dir / "global_step_100/huggingface")
    (run_dir / "global_step_100/manifest.json").write_text(Manifest(100, 1, "", {}, deferred=deferred).to_json())
    change_config(run_dir, "trainer.checkpoint.export.every", every)
    assert run_health(run_dir, capsys)[1][point] == level
    change_config(run_dir, "stage", "budget")  # whose controllers are exported, too
    assert run_health(run_dir, capsys)[1][point] == level
    change_config(run_dir, "trainer.checkpoint.save_contents", ["model", "optimizer", "extra"])
    assert run_health(run_dir, capsys)[1][point] == "ok"


def test_trends_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    main([str(run_dir)])
    shown = capsys.readouterr().out.partition("Trends\n")[2].splitlines()
    assert shown[0].startswith("  train/loss falls (good): 2.") and "over 30 parts of the run, p = " in shown[0]
    assert shown[1].startswith("  val/loss falls (good): ") and "over 10 validations" in shown[1]
    main([str(run_dir), "--json"])
    loss, _ = json.loads(capsys.readouterr().out)["trends"]
    assert (loss["metric"], loss["sign"], loss["better"], loss["unit"]) == ("train/loss", -1, -1, "parts of the run")
    assert loss["p_value"] < 1e-6


def test_controller_trends_are_over_epochs() -> None:
    [curve] = [each for each in CURVES if each.name == "more and more are over budget"]
    found = {each.metric: each for each in metric_trends(view_of(curve, 0))}
    assert list(found) == ["train/reward_total_mean", "train/accuracy_mean", "train/budget_violation_mean"]
    assert {(each.count, each.unit) for each in found.values()} == {(30, "epochs")}
    assert found["train/reward_total_mean"].sentence.startswith("train/reward_total_mean rises (good)")
    assert found["train/budget_violation_mean"].sentence.startswith("train/budget_violation_mean rises (bad)")
    [flat] = [each for each in CURVES if each.name == "a controller learns nothing"]
    assert {each.sign for each in metric_trends(view_of(flat, 0))} == {0}


def test_trend_does_not_contradict_its_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    falling = [3.0 - 0.004 * step for step in range(1, 541)]
    rows = [(step, {"train/loss": loss}) for step, loss in enumerate([*falling, *[1000.0] * 60], start=1)]
    [loss] = metric_trends(HealthView(history_of(rows), RunContext("sft", 600), HealthLimits()))
    assert (loss.sign, loss.last) == (0, 1000.0) and loss.p_value < 0.001
    assert "falls" not in loss.sentence and "rises" not in loss.sentence


@pytest.mark.parametrize(
    ("loss", "rule"), [(2e6, "loss_diverging"), (1e302, "loss_not_finite"), (-1.7e308, "loss_not_finite")]
)
def test_final_loss_of_exploded_run_is_not_in_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: float, rule: str
) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    late = {"train/loss": loss, "train/grad_norm": 1e200}
    rows = [{**row, **(late if row["step"] > 200 and "train/loss" in row else {})} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        code, levels = run_health(run_dir, capsys)
    assert (code, levels["the final train/loss is in range"], levels[rule]) == (1, "alarm", "alarm")
    assert levels["train/loss falls"] == "ok"  # in its first hundred steps


def test_loss_far_above_the_start_is_no_final_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(step, {"train/loss": 40.0}) for step in range(1, 301)]
    found = {
        each.name: each.run(HealthView(history_of(rows), RunContext("sft", 300), HealthLimits())) for each in RULES
    }
    assert found["final_loss"] is not None and found["final_loss"].level == Level.WARNING


def test_unreadable_rows_are_one_warning_and_one_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "note": "text"}) + "\n" for row in rows))
    assert "metrics.jsonl can be read" not in run_health(run_dir, capsys)[1]
    path.write_text("".join(json.dumps({**row, "step": row["step"] + 0.5}) + "\n" for row in rows))
    assert main([str(run_dir)]) == 0
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1 and f"skipped {len(rows) - 1} of {len(rows)} lines" in shown.err
    assert "line 1: its step" in shown.err and "WARNING metrics.jsonl can be read" in shown.out
    assert parse_rows(path.read_bytes().splitlines())[2] == len(rows)


def test_missing_or_uneven_checkpoints_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    (run_dir / "latest_checkpointed_iteration.txt").unlink()
    write_checkpoint(run_dir, 200)
    large = run_dir / "global_step_200/huggingface/model.safetensors"
    large.write_bytes(b"x" * 640)
    (run_dir / "global_step_200/manifest.json").write_text(
        Manifest(200, 1, "", {"huggingface/model.safetensors": {"bytes": 640}}).to_json()
    )
    code, levels = run_health(run_dir, capsys)
    assert code == 0 and levels["latest_checkpointed_iteration.txt names the newest checkpoint"] == "warning"
    assert levels["checkpoints have similar sizes"] == "notice"
    shutil.rmtree(run_dir / "global_step_300")
    code, levels = run_health(run_dir, capsys)
    assert code == 1 and levels["the expected checkpoints exist"] == "alarm"
    shutil.rmtree(run_dir / "global_step_200")
    code, levels = run_health(run_dir, capsys)
    assert code == 1 and levels["the expected checkpoints exist"] == "alarm"
    assert (
        levels["checkpoints have similar sizes"]
        is levels["every checkpoint is complete, including huggingface/"]
        is None
    )


def test_thresholds_come_from_run_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    config = OmegaConf.load(run_dir / "config.yaml")
    config.health.limits.initial_loss_max = 1.0
    OmegaConf.save(config, run_dir / "config.yaml")
    assert run_health(run_dir, capsys)[1]["initial_loss"] == "warning"
    config.health.limits = {"of_another_version": 1}
    OmegaConf.save(config, run_dir / "config.yaml")
    assert refused(run_dir, capsys).startswith("error: health.limits in config.yaml is from another version")


def test_directory_that_is_not_a_run_is_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no run.json" in refused(tmp_path, capsys)
    run_dir = write_run(tmp_path, "a textbook run")
    (run_dir / "metrics.jsonl").rename(run_dir / "metrics")
    assert "the run failed before its first step" in refused(run_dir, capsys)
    (run_dir / "metrics").rename(run_dir / "metrics.jsonl")
    (run_dir / "config.yaml").write_text("- a list")
    assert "is not a YAML mapping" in refused(run_dir, capsys)
    (run_dir / "config.yaml").write_text("stage: sft")
    assert "not the configuration of a run" in refused(run_dir, capsys)
    with pytest.raises(SystemExit) as left:
        main([])
    assert left.value.code == 2 and main(["--rules"]) == 0
    assert "overfitting" in capsys.readouterr().out
    assert main(["--rules", "--json"]) == 0
    assert "overfitting" in json.loads(capsys.readouterr().out)


def test_unreadable_directory_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 would mean an alarm; the tests may run as root, who can read everything."""

    def is_file(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", is_file)
    assert f"cannot read {tmp_path} (Permission denied)" in refused(tmp_path, capsys)


def test_names_outside_locale_are_escaped(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, "experiment": "\u6a21\u578b"}))
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "verl_ext.health", str(run_dir)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert r"/\u6a21\u578b (sft)" in done.stdout and done.stderr == ""


def refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main([str(run_dir)])
    assert left.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("closed", "level"), [(["csv", "console", "wandb"], "ok"), (["csv", "console"], "warning"), (None, None)]
)
def test_unclosed_wandb_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], closed: list[str] | None, level: str | None
) -> None:
    run_dir = write_run(tmp_path, "a textbook run")
    change_config(run_dir, "trainer.logger", ["console", "wandb"])
    if closed is not None:
        record = RunRecord(run_dir)
        record.start_attempt(first_step=300, world_size=1, total_steps=300)
        record.end_attempt("finished", 300, "all steps completed", closed)
    assert run_health(run_dir, capsys)[1]["the W&B run is closed"] == level


@pytest.mark.parametrize(
    ("environment", "busy"),
    [({"CUDA_VISIBLE_DEVICES": "GPU-b,0"}, "used for 70%, 90%"), ({}, "used for 90%, 0%"), (None, None)],
)
def test_utilization_counts_only_gpus_of_ranks(
    environment: dict[str, str] | None, busy: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second GPU is idle, although another user's process has memory there."""
    percents = {"GPU-a1": 90, "GPU-c2": 0, "GPU-b3": 70}
    nvml: Any = ModuleType("pynvml")
    nvml.__spec__ = ModuleSpec("pynvml", None)
    nvml.NVMLError = RuntimeError
    nvml.nvmlInit = nvml.nvmlShutdown = lambda: None
    nvml.nvmlDeviceGetCount = lambda: len(percents)
    nvml.nvmlDeviceGetHandleByIndex = list(percents).__getitem__
    nvml.nvmlDeviceGetHandleByUUID = lambda name: name
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda _: ["a process"]
    nvml.nvmlDeviceGetUtilizationRates = lambda name: SimpleNamespace(gpu=percents[name])
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(checklist, "listed_gpus", lambda: list(percents), raising=False)
    monkeypatch.setattr(checklist, "GPU_PAUSE_S", 0)
    run_dir = write_run(tmp_path, "a textbook run", "running", "")
    change_config(run_dir, "trainer.device", "cuda")
    change_config(run_dir, "trainer.n_gpus_per_node", 2)
    recorded = {} if environment is None else {"environment": environment}
    change_attempt(run_dir, host=socket.gethostname(), **recorded)
    result = checklist.gpus_are_busy(RunDirectory.read(run_dir))
    assert (None if result is None else result.message.partition(";")[0]) == busy
