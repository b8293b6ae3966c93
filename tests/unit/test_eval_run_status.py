"""What a watcher says of the run that it waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_pipeline.flow.run_status import RunStatus
from verl_ext.metrics.run_record import RunRecord


def test_a_run_that_nobody_has_started_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = RunStatus(tmp_path)
    assert not status.has_finished() and not status.has_finished()
    assert capsys.readouterr().err.count("has not been started yet") == 1


def test_one_that_its_launcher_starts_is_waited_for_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord(tmp_path)
    record.mark_waiting(project="p", experiment="e")
    status = RunStatus(tmp_path)
    assert not status.has_finished()
    record.start_attempt(first_step=0, world_size=1, total_steps=2)
    assert not status.has_finished()
    assert not capsys.readouterr().err
    record.end_attempt("finished", 2, "all steps are done")
    assert status.has_finished()
