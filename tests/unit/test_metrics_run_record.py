"""run.json across starts, ends, kills and damage."""

import os
import signal
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import MetricsFile, read_metrics
from verl_ext.metrics.run_record import LOST, RunRecord

ROOT = Path(__file__).parents[2]

KILLED_RUN = """
import os, signal, sys
from verl_ext.metrics.jsonl import MetricsFile
from verl_ext.metrics.run_record import RunRecord
attempt = RunRecord(sys.argv[1]).start_attempt(first_step=0, world_size=2, total_steps=10)
file = MetricsFile(sys.argv[1] + "/metrics.jsonl", attempt)
for step in (1, 2, 3):
    file.append(step, {"train/loss": 1.0})
os.kill(os.getpid(), signal.SIGKILL)
"""


def start(record, first_step=0):
    return record.start_attempt(first_step=first_step, world_size=2, total_steps=10)


def test_missing_record_reads_as_waiting(tmp_path):
    run = RunRecord(tmp_path / "nowhere").read()
    assert run["status"] == "waiting" and run["attempts"] == [] and run["project"] is None


def test_record_follows_attempts_of_run(tmp_path):
    record = RunRecord(tmp_path / "run")
    record.mark_waiting(project="p", experiment="e", stage="sft", recipe="r", config_digest="d")
    assert record.read()["status"] == "waiting"
    assert start(record) == 1
    assert record.read()["status"] == "running" and record.read()["total_steps"] == 10
    record.end_attempt("stopped", 4, "asked to stop")
    assert start(record, first_step=4) == 2
    record.end_attempt("finished", 10, "all steps done")
    run = record.read()
    assert (run["status"], run["project"], run["stage"]) == ("finished", "p", "sft")
    assert [(a["attempt"], a["first_step"], a["last_step"]) for a in run["attempts"]] == [(1, 0, 4), (2, 4, 10)]
    assert run["attempts"][0]["exit_reason"] == "asked to stop" and run["attempts"][0]["pid"] == os.getpid()
    assert datetime.fromisoformat(run["attempts"][1]["end"]).tzinfo is not None


def test_end_does_not_recreate_moved_directory(tmp_path):
    record = RunRecord(tmp_path / "run")
    start(record)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="no open attempt"):
        record.end_attempt("finished", 10, "done")
    for end in (lambda: record.end_if_running("failed", "lost"), lambda: record.end_refused("lost")):
        with pytest.raises(UserError, match="moved or removed; move it back"):
            end()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("status", "ends"), [("finished", "finished"), ("stopped", "stopped"), ("failed", "failed")])
def test_rejected_launch_restores_previous_record(tmp_path, status, ends):
    RunRecord(tmp_path).mark_waiting(config_digest="old")
    start(RunRecord(tmp_path))
    RunRecord(tmp_path).end_attempt(status, 10, "done")
    before = (tmp_path / "run.json").read_text()
    for begins in (False, True):  # refused before rank 0 began its attempt, or after
        record = RunRecord(tmp_path)
        record.mark_waiting(config_digest="new")
        if begins:
            start(record)
            record.end_attempt("failed", None, "refused")
        record.end_refused("the input cannot be used")
        run = record.read()
        assert run["status"] == ends
        assert ((tmp_path / "run.json").read_text() == before) == (status != "failed")


def test_run_rejected_after_training_has_failed(tmp_path):
    RunRecord(tmp_path).mark_waiting(config_digest="old")
    start(RunRecord(tmp_path))
    RunRecord(tmp_path).end_attempt("finished", 10, "done")
    record = RunRecord(tmp_path)
    record.mark_waiting(config_digest="new")
    MetricsFile(tmp_path / "metrics.jsonl", start(record, first_step=10)).append(11, {"train/loss": 1.0})
    record.end_refused("the loss is not finite")
    run = record.read()
    assert run["status"] == "failed" and run["attempts"][-1]["exit_reason"] == "the loss is not finite"


def test_rejected_new_run_has_failed(tmp_path):
    record = RunRecord(tmp_path)
    record.mark_waiting(config_digest="new")
    record.end_refused("row 0 is too long")
    assert record.read()["status"] == "failed" and len(record.read()["attempts"]) == 1


def test_killed_attempt_is_closed_from_its_metrics(tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED_RUN, str(tmp_path)], cwd=ROOT, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    record = RunRecord(tmp_path)
    assert record.read()["attempts"][0]["end"] is None
    assert start(record, first_step=2) == 2
    lost, running = record.read()["attempts"]
    last_time = read_metrics(tmp_path / "metrics.jsonl")[-1]["time"]
    assert (lost["last_step"], lost["exit_reason"], running["end"]) == (3, LOST, None)
    assert abs(datetime.fromisoformat(lost["end"]).timestamp() - last_time) <= 1


def test_killed_attempt_without_metrics_ends_at_its_start(tmp_path):
    record = RunRecord(tmp_path)
    start(record)
    start(record)
    lost = record.read()["attempts"][0]
    assert lost["end"] == lost["start"] and lost["last_step"] is None


@pytest.mark.parametrize("damage", ["", '{"status": "runn', "[]", '{"status": "running", "attempts": [1]}'])
def test_corrupt_record_is_moved_and_attempt_numbers_continue(tmp_path, capsys, damage):
    (tmp_path / "run.json").write_text(damage)
    MetricsFile(tmp_path / "metrics.jsonl", 4).append(9, {"train/loss": 1.0})
    record = RunRecord(tmp_path)
    with pytest.raises(UserError, match="run.json"):
        record.read()
    assert start(record) == 5
    assert (tmp_path / "run.json.corrupt").read_text() == damage
    assert "run.json.corrupt" in capsys.readouterr().err
    assert record.read()["status"] == "running"


def test_launcher_marks_running_run_failed_once(tmp_path):
    record = RunRecord(tmp_path)
    MetricsFile(tmp_path / "metrics.jsonl", start(record)).append(7, {"train/loss": 1.0})
    assert record.end_if_running("failed", "rank 1 died with exit code 1")
    run = record.read()
    assert run["status"] == "failed" and run["attempts"][0]["last_step"] == 7
    assert not record.end_if_running("failed", "again")
    assert record.read() == run
    record.replace_failure("rank 1 was killed by SIGKILL")
    assert record.read()["attempts"][-1]["exit_reason"] == "rank 1 was killed by SIGKILL"


def test_ranks_that_died_before_training_record_reason(tmp_path):
    record = RunRecord(tmp_path)
    record.mark_waiting(project="p")
    assert record.end_if_running("failed", "the model cannot be read")
    assert record.read()["status"] == "failed"
    assert record.read()["attempts"][0]["exit_reason"] == "the model cannot be read"
    assert start(record) == 2


def test_rejects_end_without_open_attempt(tmp_path):
    with pytest.raises(UserError, match="no open attempt"):
        RunRecord(tmp_path).end_attempt("finished", 1, "done")


def test_reading_record_imports_no_torch():
    code = "import sys, verl_ext.metrics.run_record, verl_ext.metrics.registry, verl_ext.metrics.recorder\n"
    code += "assert not {'torch', 'wandb', 'verl', 'tensorboard'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_first_start_defaults_to_first_attempt(tmp_path):
    record = RunRecord(tmp_path)
    assert record.first_start() is None
    start(record)
    attempt = datetime.fromisoformat(record.read()["attempts"][0]["start"])
    assert record.first_start() == attempt.astimezone().replace(tzinfo=None), "a record without `first_start`"
    record.mark_waiting(first_start="2026-07-04T09:30:00")
    assert record.first_start() == datetime(2026, 7, 4, 9, 30)
    record.mark_waiting(first_start=["damaged"])
    assert record.first_start() == attempt.astimezone().replace(tzinfo=None)


def test_next_attempt_is_number_of_next_start(tmp_path):
    record = RunRecord(tmp_path)
    for number in (1, 2):
        assert record.next_attempt() == number
        start(record)
        record.end_attempt("stopped", 1, "stopped")


def test_unreadable_record_names_file_once(tmp_path):
    path = tmp_path / "run.json"
    path.mkdir()
    with pytest.raises(UserError) as caught:
        RunRecord(tmp_path).read()
    assert str(caught.value) == f"cannot read the run record {path} (Is a directory); make it readable"
