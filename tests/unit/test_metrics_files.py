"""metrics.jsonl and the CSV tables: behavior after kills and restarts and with unusual values."""

import csv
import json
import math
from pathlib import Path

import pytest

from verl_ext.errors import UserError
from verl_ext.files import LineWriter
from verl_ext.metrics.csv_tables import TRAINING_FILE, VALIDATION_FILE, StepTables
from verl_ext.metrics.jsonl import MetricsFile, MetricsRow, read_metrics
from verl_ext.metrics.timing import TraceFile


def write_row(path, attempt=1, step=1, **metrics):
    file = MetricsFile(path, attempt)
    file.append(step, metrics)
    file.close()


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_rows_keep_step_attempt_and_time(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    write_row(path, attempt=1, step=3, loss=0.5)
    write_row(path, attempt=2, step=2, loss=0.25)
    rows = read_metrics(path)
    assert [(row["step"], row["attempt"], row["loss"]) for row in rows] == [(3, 1, 0.5), (2, 2, 0.25)]
    assert rows[0]["time"] <= rows[1]["time"]


def test_non_finite_values_round_trip_as_strings(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_row(path, a=math.nan, b=math.inf, c=-math.inf)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(path.read_text(), parse_constant=refuse)["b"] == "Infinity"
    [row] = read_metrics(path)
    assert math.isnan(row["a"]) and row["b"] == math.inf and row["c"] == -math.inf


def test_numpy_and_torch_scalars_are_written_as_numbers(tmp_path):
    import numpy
    import torch

    write_row(tmp_path / "m.jsonl", a=numpy.float32(0.5), b=torch.tensor(2.0), c=numpy.int64(7))
    [row] = read_metrics(tmp_path / "m.jsonl")
    assert (row["a"], row["b"], row["c"]) == (0.5, 2.0, 7) and isinstance(row["c"], int)


@pytest.mark.parametrize("metrics", [{"loss": "high"}, {"loss": None}, {"step": 1.0}])
def test_rejects_non_numeric_row_without_writing(tmp_path, metrics):
    file = MetricsFile(tmp_path / "m.jsonl", 1)
    with pytest.raises(UserError):
        file.append(1, metrics)
    assert (tmp_path / "m.jsonl").read_text() == ""


TORN = [
    b'{"step": 2, "att',
    b'{"step": 2, "att\n',
    b"\0" * 200_000,
    b"\xff\xfe",
    b'{"a": 1}\n',
    b'{"step": -3, "attempt": 1, "time": 1}\n',
]


@pytest.mark.parametrize(
    "torn", TORN, ids=["cut", "cut with newline", "zeros", "not UTF-8", "not a row", "negative step"]
)
def test_torn_tail_is_truncated_with_warning(tmp_path, capsys, torn):
    path = tmp_path / "metrics.jsonl"
    write_row(path, step=1)
    with open(path, "ab") as file:
        file.write(torn)
    assert [row["step"] for row in read_metrics(path)] == [1]
    assert capsys.readouterr().err == ""
    write_row(path, attempt=2, step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert str(path) in capsys.readouterr().err


def test_complete_last_line_without_newline_is_kept(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    write_row(path, step=1)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    write_row(path, step=2)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    assert capsys.readouterr().err == ""


def test_unreadable_line_is_skipped_with_line_number(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    write_row(path, step=1)
    with open(path, "a") as file:
        file.write("garbage\n")
    line = path.read_text().splitlines()[0]
    with open(path, "a") as file:
        file.write(line + "\n")
    assert len(read_metrics(path)) == 2
    assert "skipped 1 of 3 lines" in (shown := capsys.readouterr().err) and "line 2: it is not a JSON object" in shown


def test_missing_file_or_directory_raises_user_error(tmp_path):
    with pytest.raises(UserError, match="none.jsonl"):
        read_metrics(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="cannot write"):
        MetricsFile(tmp_path, 1)


def test_full_disk_raises_user_error():
    with pytest.raises(UserError, match="No space left"):
        MetricsFile("/dev/full", 1).append(1, {"train/loss": 1.0})


def test_training_and_validation_rows_go_to_separate_tables(tmp_path):
    history = StepTables(tmp_path)
    history.log_row(MetricsRow(1, 1, 10.0, {"train/loss": 2.0}))
    history.log_row(MetricsRow(2, 1, 11.0, {"train/loss": 1.5, "val/loss": 1.7, "time/val/step_s": 3.0}))
    history.log_row(MetricsRow(3, 1, 12.0, {"val/loss": 1.6, "system/peak_memory_gib": 4.0}))
    history.close()
    training, validation = read_csv(tmp_path / TRAINING_FILE), read_csv(tmp_path / VALIDATION_FILE)
    assert [row["step"] for row in training] == ["1", "2"]
    assert list(training[0]) == ["step", "attempt", "time", "train/loss"]
    assert [(row["step"], row["val/loss"]) for row in validation] == [("2", "1.7"), ("3", "1.6")]
    assert [row["system/peak_memory_gib"] for row in validation] == ["", "4.0"]


def test_reward_measurements_go_to_validation_table(tmp_path):
    history = StepTables(tmp_path)
    history.log_row(MetricsRow(1, 1, 10.0, {"train/reward_total_mean": 0.5}))
    history.log_row(MetricsRow(1, 1, 11.0, {"eval/reward_total_mean": 0.25, "time/eval/step_s": 3.0}))
    history.log_row(MetricsRow(1, 1, 12.0, {"time/train/save_s": 1.0}))
    history.close()
    training, validation = read_csv(tmp_path / TRAINING_FILE), read_csv(tmp_path / VALIDATION_FILE)
    assert [list(row) for row in training] == [["step", "attempt", "time", "train/reward_total_mean"]]
    assert [(row["eval/reward_total_mean"], row["time/eval/step_s"]) for row in validation] == [("0.25", "3.0")]


def test_new_columns_leave_earlier_rows_unchanged(tmp_path):
    StepTables(tmp_path).log_row(MetricsRow(1, 1, 10.0, {"train/loss": math.nan}))
    second = StepTables(tmp_path)
    second.log_row(MetricsRow(1, 2, 20.0, {"train/loss": 2.0, "train/grad_norm": 0.5}))
    second.log_row(MetricsRow(2, 2, 21.0, {"train/grad_norm": 0.4}))
    rows = read_csv(tmp_path / TRAINING_FILE)
    assert [(r["attempt"], r["train/loss"], r["train/grad_norm"]) for r in rows] == [
        ("1", "nan", ""),
        ("2", "2.0", "0.5"),
        ("2", "", "0.4"),
    ]
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("torn", ["2,1,11.0,1.", "2,1\n", "\0\0\0"])
def test_torn_csv_row_is_truncated(tmp_path, capsys, torn):
    StepTables(tmp_path).log_row(MetricsRow(1, 1, 10.0, {"train/loss": 2.0}))
    with open(tmp_path / TRAINING_FILE, "a") as file:
        file.write(torn)
    StepTables(tmp_path).log_row(MetricsRow(3, 2, 12.0, {"train/loss": 1.0}))
    assert [row["step"] for row in read_csv(tmp_path / TRAINING_FILE)] == ["1", "3"]
    assert TRAINING_FILE in capsys.readouterr().err


def test_torn_csv_header_starts_new_table(tmp_path):
    (tmp_path / TRAINING_FILE).write_text("step,attem")
    StepTables(tmp_path).log_row(MetricsRow(1, 1, 10.0, {"train/loss": 2.0}))
    assert [row["train/loss"] for row in read_csv(tmp_path / TRAINING_FILE)] == ["2.0"]


@pytest.mark.parametrize("blocked", ["trace", "trace/attempt_1_rank_0.json"])
def test_unopenable_trace_does_not_stop_run(tmp_path, capsys, blocked):
    if blocked == "trace":
        (tmp_path / blocked).write_text("a file where the directory belongs")
    else:
        (tmp_path / blocked).mkdir(parents=True)
    trace = TraceFile(tmp_path, 1, 0)
    trace.span("step", 0.0, 1.0)
    assert capsys.readouterr().err.count("the trace of rank 0 ends here") == 1


def test_trace_replaces_file_of_unrecorded_start(tmp_path):
    for name in ("killed", "resumed"):
        TraceFile(tmp_path, 2, 1).span(name, 0.0, 1.0)
    [path] = (tmp_path / "trace").iterdir()
    assert path.name == "attempt_2_rank_1.json"
    events = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert [event["name"] for event in events] == ["process_name", "resumed"]


def test_unwritable_trace_does_not_stop_run(tmp_path, capsys, monkeypatch):
    """One message reports it."""
    monkeypatch.setattr("verl_ext.metrics.timing.LineWriter", lambda path: LineWriter(Path("/dev/full")))
    trace = TraceFile(tmp_path, 1, 0)
    trace.span("step", 0.0, 1.0)
    trace.async_span("1/p/0", "rollout", 0.0, 1.0)
    said = capsys.readouterr()
    assert (said.out + said.err).count("the trace of rank 0 ends here") == 1
