"""What a watcher says of the run that it waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval_pipeline.checkpoints import eval_dir_of_run
from eval_pipeline.publish import Publisher
from eval_pipeline.recipe import load_eval_config
from eval_pipeline.run import EvalContext
from eval_pipeline.watch import RunWatcher
from verl_ext.metrics.run_record import RunRecord


def watcher_of(run_dir: Path) -> RunWatcher:
    context = EvalContext(eval_dir_of_run(run_dir), load_eval_config("quickstart"))
    return RunWatcher(context, Publisher(context, owns_selection=True))


def test_a_run_that_nobody_has_started_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = watcher_of(tmp_path)
    assert not watcher.has_finished() and not watcher.has_finished()
    assert capsys.readouterr().err.count("has not been started yet") == 1


def test_one_that_its_launcher_starts_is_waited_for_in_silence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = RunRecord(tmp_path)
    record.mark_waiting(project="p", experiment="e")
    watcher = watcher_of(tmp_path)
    assert not watcher.has_finished()
    record.start_attempt(first_step=0, world_size=1, total_steps=2)
    assert not watcher.has_finished()
    assert not capsys.readouterr().err
    record.end_attempt("finished", 2, "all steps are done")
    assert watcher.has_finished()
