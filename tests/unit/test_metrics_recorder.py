"""The recorder with real TensorBoard and verl trackers, and with sinks that fail."""

import csv
import json
import math
import sys

import pytest

from verl_ext.errors import UserError
from verl_ext.metrics.csv_tables import EPOCH_COLUMNS, EpochTables, StepTables
from verl_ext.metrics.jsonl import HealthEvent, read_metrics
from verl_ext.metrics.recorder import MetricsRecorder
from verl_ext.metrics.sinks import LogFileSink


def make_recorder(run_dir, *backends, attempt=1, **more):
    arguments = {"project": "p", "experiment": "e", "config": {"trainer": {"total_steps": 10}}, "total_steps": 10}
    return MetricsRecorder(run_dir=run_dir, attempt=attempt, backends=backends, **{**arguments, **more})


def test_tensorboard_has_rows_of_both_attempts_before_close(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorders = [make_recorder(tmp_path, "tensorboard", attempt=attempt) for attempt in (1, 2)]
    recorders[0].log(1, {"train/loss": 2.0, "train/lr(1e-3)": 0.5})
    recorders[1].log(2, {"train/loss": math.nan})
    scalars = {}  # read before close: a kill must not lose points
    for path in (tmp_path / "tensorboard").iterdir():
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            scalars.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    assert scalars["train/lr(1e-3)"] == [(1, 0.5)]
    assert sorted(step for step, _ in scalars["train/loss"]) == [1, 2]
    for recorder in recorders:
        recorder.close()


def test_tensorboard_hides_lost_steps_of_earlier_attempts(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for attempt, first_step, steps in ((1, 0, range(5)), (2, 2, (3, 4)), (3, 4, (5,))):
        recorder = make_recorder(tmp_path, "tensorboard", attempt=attempt, first_step=first_step)
        for step in steps:
            recorder.log(step, {"train/loss": float(attempt)})
        recorder.close()
        [own] = (path for path in (tmp_path / "tensorboard").iterdir() if path.suffix != ".attempt")
        own.rename(own.with_name(f"events.out.tfevents.{attempt}.attempt"))  # all have the time of the same second
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 3.0)]


def test_verl_file_tracker_writes_one_file_per_attempt(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    for attempt in (1, 2):
        recorder = make_recorder(tmp_path, "file", attempt=attempt)
        recorder.log(attempt, {"train/loss": 1.0})
        recorder.close()
    rows = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("verl_file_logger_*.jsonl"))]
    assert rows == [{"step": step, "data": {"train/loss": 1.0}} for step in (1, 2)]


@pytest.mark.parametrize(("name", "hint"), [("tensorbord", "'tensorboard'"), ("x", "mlflow.*tensorboard")])
def test_rejects_unknown_backend_with_suggestion(tmp_path, name, hint):
    with pytest.raises(UserError, match=f"'{name}'.*{hint}"):
        make_recorder(tmp_path / "run", "console", name)
    assert not (tmp_path / "run").exists()


def test_missing_tracker_package_is_skipped_with_one_warning(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "swanlab", None)
    recorder = make_recorder(tmp_path, "swanlab")
    recorder.log(1, {"train/loss": 1.0})
    recorder.close()
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1 and "swanlab" in warnings[0]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_failing_sink_warns_once_and_others_continue(tmp_path, capsys, monkeypatch):
    calls = []

    def fail(self, row):
        calls.append(row.step)
        raise RuntimeError("the disk\nwent away")

    monkeypatch.setattr(StepTables, "log_row", fail)
    recorder = make_recorder(tmp_path, "console", log_every=1)
    for step in (1, 2, 3):
        recorder.log(step, {"train/loss": 1.0})
    recorder.close()
    recorder.close()
    shown = capsys.readouterr()
    assert calls == [1] and shown.err.count("warning:") == 1 and "csv: RuntimeError: the disk went away" in shown.err
    assert len(shown.out.splitlines()) == 3 and len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def test_failing_sink_does_not_stop_events_and_epochs(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise RuntimeError("the disk went away")

    monkeypatch.setattr(LogFileSink, "log_event", fail)
    monkeypatch.setattr(EpochTables, "log_epoch", fail)
    recorder = make_recorder(tmp_path, "console", log_every=1, by_epoch=True, log_file=True)
    recorder.log_event(HealthEvent(3, "loss_rising", "warning", "the loss rises"))
    recorder.log_event(HealthEvent(4, "loss_rising", "alarm", "it rises on"))
    recorder.log_epoch("Train", dict.fromkeys(EPOCH_COLUMNS, 1.0))
    recorder.close()
    shown = capsys.readouterr()
    assert shown.err.count("warning:") == 2 and "log file: RuntimeError" in shown.err and "csv: " in shown.err
    assert "warning: loss_rising: the loss rises" in shown.out and "alarm: loss_rising: it rises on" in shown.out
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(each["step"], each["level"]) for each in events] == [(3, "warning"), (4, "alarm")]


def test_notes_go_to_console_and_log_file(tmp_path, capsys):
    recorder = make_recorder(tmp_path, "console", "tensorboard", log_file=True)
    recorder.log_note("Loaded 8 training and 4 validation samples.")
    recorder.close()
    assert capsys.readouterr().out == "Loaded 8 training and 4 validation samples.\n"
    assert (tmp_path / "train.log").read_text().endswith(" - INFO - Loaded 8 training and 4 validation samples.\n")


def test_samples_survive_torn_line_and_raise_if_unwritable(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"step": 1, "text": "a"}\n{"step": 2, "te')
    recorder = make_recorder(tmp_path, attempt=2)
    recorder.log_samples(2, [{"text": "b"}, {"text": "\u00e9"}])
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(row["step"], row["text"]) for row in rows] == [(1, "a"), (2, "b"), (2, "\u00e9")]
    assert rows[1]["attempt"] == 2
    (tmp_path / "other/samples.jsonl").mkdir(parents=True)
    refused = make_recorder(tmp_path / "other")
    with pytest.raises(UserError, match=r"cannot write .*samples.jsonl \(Is a directory\)"):
        refused.log_samples(1, [{"text": "c"}])
    refused.close()


def test_csv_rows_have_time_of_metrics_row(tmp_path):
    recorder = make_recorder(tmp_path)
    recorder.log(1, {"train/loss": 1.0})
    recorder.close()
    with open(tmp_path / "training_history.csv", newline="") as file:
        [row] = csv.DictReader(file)
    assert float(row["time"]) == read_metrics(tmp_path / "metrics.jsonl")[0]["time"]
