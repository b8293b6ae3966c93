"""Health rules during an attempt: their findings are recorded, and a failing rule does not stop the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_ext.health.watch import HealthMonitor
from verl_ext.metrics.run_record import RunRecord
from verl_ext.metrics.sinks import ConsoleSink
from verl_ext.trainer.run_logger import RunLogger
from verl_ext.trainer.stages import load_config

pytestmark = pytest.mark.usefixtures("one_rank")


def attempt_in(run_dir: Path, *overrides: str, first_step: int = 0) -> RunLogger:
    words = [f"trainer.default_local_dir={run_dir}", "trainer.logger=[]", "health.every=1", *overrides]
    config = load_config("sft", words)
    return RunLogger(config, first_step, 100, 10, 1, True, "fp32", (12, 4))


def events(run_dir: Path) -> list[str]:
    path = run_dir / "events.jsonl"
    return [json.loads(line)["name"] for line in path.read_text().splitlines()] if path.exists() else []


def test_finding_is_recorded_and_may_stop_run(tmp_path: Path) -> None:
    with attempt_in(tmp_path, "health.stop_on=[initial_loss]") as attempt:
        for step in range(1, 6):
            assert attempt.stop_rule is None
            attempt.log(step, {"train/loss": 9.0})
        assert attempt.stop_rule == "initial_loss"
    assert events(tmp_path) == ["initial_loss"]


def test_failing_rule_disables_rules_but_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with attempt_in(tmp_path) as attempt:
        monkeypatch.setattr(HealthMonitor, "findings", lambda self: 1 / 0)
        for step in (1, 2, 3):
            attempt.log(step, {"train/loss": 9.0})
        assert attempt.stop_rule is None and attempt.last_step == 3
    warning = "health rules are disabled from step 1 on: ZeroDivisionError: division by zero; fix the rule or file, or"
    assert capsys.readouterr().err.count(warning) == 1


def test_step_without_loss_counts_as_step(tmp_path: Path) -> None:
    with attempt_in(tmp_path, "health.every=6", "health.stop_on=[initial_loss]") as attempt:
        for step in range(1, 6):
            attempt.log(step, {"train/loss": 9.0})
        attempt.log(6, {"train/num_loss_tokens": 0.0})
        assert attempt.stop_rule == "initial_loss" and attempt.last_step == 6


def test_disabled_rules_record_nothing(tmp_path: Path) -> None:
    with attempt_in(tmp_path, "health.enabled=false") as attempt:
        for step in range(1, 9):
            attempt.log(step, {"train/loss": 9.0})
    assert events(tmp_path) == []


def test_changed_learning_rate_is_compared_only_with_its_own_steps(tmp_path: Path) -> None:
    start = ("optim.lr_scheduler=constant", "optim.lr_warmup_steps_ratio=0", "optim.lr=1e-3")
    with attempt_in(tmp_path, *start) as attempt:
        for step in range(1, 9):
            attempt.log(step, {"train/loss": 1.0, "train/lr(1e-3)": 1.0})
    with attempt_in(tmp_path, *start, "optim.lr=1e-4", first_step=8) as attempt:
        for step in range(9, 20):
            attempt.log(step, {"train/loss": 1.0, "train/lr(1e-3)": 0.1 if step < 15 else 1.0})
            assert events(tmp_path) == (["lr_schedule"] if step >= 17 else [])


def test_second_attempt_does_not_repeat_findings(tmp_path: Path) -> None:
    with attempt_in(tmp_path) as attempt:
        for step in range(1, 9):
            attempt.log(step, {"train/loss": 9.0})
    second = RunLogger(attempt.config, 6, 100, 10, 1, True, "fp32", (12, 4))
    with second:
        for step in range(7, 12):
            second.log(step, {"train/loss": 9.0})
    assert events(tmp_path) == ["initial_loss"]


def test_untrained_weights_may_start_at_random_loss(tmp_path: Path) -> None:
    RunRecord(tmp_path).mark_waiting(untrained_loss=6.2)
    with attempt_in(tmp_path) as attempt:
        for step in range(1, 9):
            attempt.log(step, {"train/loss": 6.3})
    assert events(tmp_path) == []
    RunRecord(tmp_path / "other").mark_waiting(untrained_loss=6.2)
    with attempt_in(tmp_path / "other") as attempt:
        for step in range(1, 9):
            attempt.log(step, {"train/loss": 9.0})
    assert events(tmp_path / "other") == ["initial_loss"]


@pytest.mark.parametrize("fails", [False, True])
def test_closed_trackers_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    if fails:
        monkeypatch.setattr(ConsoleSink, "close", lambda self, exit_code: 1 / 0)
    with attempt_in(tmp_path, "trainer.logger=[console]") as attempt:
        attempt.log(1, {"train/loss": 2.0})
    [recorded] = RunRecord(tmp_path).read()["attempts"]
    assert ("console" in recorded["closed_trackers"]) == (not fails) and "csv" in recorded["closed_trackers"]
