"""The monitor's follower and its database: what they read from run files, and what pages get."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.monitor import look, write_record, write_rows
from tests.helpers.processes import wait_until
from verl_ext.errors import UserError
from verl_ext.metrics import heartbeat
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.metrics.run_record import RunRecord
from verl_ext.monitor import follower as follower_module
from verl_ext.monitor import run_files
from verl_ext.monitor.charts import schedule_points
from verl_ext.monitor.database import MonitorDatabase, database_for
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.run_files import events_of_row
from verl_ext.monitor.server import csv_lines, csv_response
from verl_ext.processes import pid_namespace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def follower(tmp_path: Path, root: Path) -> RunFollower:
    return RunFollower(tmp_path / "cache/monitor.sqlite", root)


def query(follower: RunFollower, text: str) -> list[sqlite3.Row]:
    return follower._database._connection.execute(text).fetchall()


def count(follower: RunFollower, table: str) -> int:
    return query(follower, f"SELECT count(*) FROM {table}")[0][0]


def points(follower: RunFollower, path: str, metric: str = "train/loss") -> tuple[list[float], list[float]]:
    """The points that a page draws for a metric."""
    x, values = follower.curves(follower.runs[path]).envelopes[metric].points()
    return x.tolist(), values.tolist()


def step(follower: RunFollower, path: str = "p/e") -> int:
    return follower.curves(follower.runs[path]).step


def levels(follower: RunFollower) -> dict[str | None, str]:
    """The current level of each rule that has reported something."""
    return {event.rule: event.kind for event in follower.runs["p/e"].findings}


def test_complete_rows_are_read_once(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 6))
    path = root / "p/e/metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 6, "attempt": 1, "ti')
    look(follower)
    assert [*follower.runs] == ["p/e"] and count(follower, "training_logs") == 5
    with open(path, "a") as file:
        file.write('me": 6.0, "train/loss": "NaN"}\nnot a row\n')
    look(follower)
    look(follower)
    rows = [*follower.reader.rows(follower.runs["p/e"].id)]
    assert [(row.attempt, row.step) for row in rows] == [(1, number) for number in range(1, 7)]
    assert rows[-1].metrics == {"train/loss": "NaN"}
    assert json.loads(query(follower, "SELECT metrics FROM training_logs ORDER BY id DESC")[0][0])["time"] == 6.0
    assert follower.runs["p/e"].unreadable == 1


def test_replaced_metrics_file_is_read_from_start(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 50))
    look(follower)
    assert step(follower) == 49
    (root / "p/e/metrics.jsonl").unlink()
    write_rows(root / "p/e", 1, range(1, 4), grad_norm=2.0)
    look(follower)
    assert count(follower, "training_logs") == 3
    assert step(follower) == 3 and points(follower, "p/e") == ([1, 2, 3], [1, 2, 3])


def test_run_directory_is_never_modified(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}
    look(follower)
    run = follower.runs["p/e"]
    assert schedule_points({}, run, follower.curves(run)) == []
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def test_restarted_monitor_reads_saved_curves_and_new_rows(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "DUMP_ROWS", 64)
    monkeypatch.setattr(run_files, "BLOCK_BYTES", 4096)
    write_record(root / "p/e", a1=0)
    write_rows(root / "p/e", 1, range(1, 6001), grad_norm=1.5)
    look(follower)
    write_record(root / "p/e", a1=0, a2=5000)
    write_rows(root / "p/e", 2, range(5001, 5041))
    look(follower)
    again = RunFollower(follower.database_path, root)
    look(again)
    for metric in ("train/loss", "train/grad_norm"):
        assert points(again, "p/e", metric) == points(follower, "p/e", metric)
    x, values = points(again, "p/e")
    assert x[-1] == 6040 and values[-1] == 5040 and max(values) == 6000
    assert again.curves(again.runs["p/e"]).starts == {1: 0, 2: 6000} and step(again) == 5040
    saved = MonitorDatabase(follower.database_path)
    saved._connection.execute("DELETE FROM training_logs WHERE step < 4900")  # they are not read again
    saved._connection.commit()
    assert saved.load_curves(again.runs["p/e"].id).envelopes["train/loss"].points()[1].tolist() == values


def test_idle_run_is_saved_to_its_last_row(root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, status in (("finished", "finished"), ("live", "running")):
        write_record(root / "p" / name, status=status)
        write_rows(root / "p" / name, 1, range(1, 50))
    look(follower)
    assert [follower.runs[path].saved_state.step for path in ("p/finished", "p/live")] == [49, 0]
    monkeypatch.setattr(follower_module, "IDLE_S", -1.0)
    look(follower)
    saved = follower.runs["p/live"].saved_state
    assert (saved.step, saved.latest) == (49, {"train/loss": 49.0})


def test_curves_are_saved_when_evicted_from_memory(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "MAX_CACHED_RUNS", 2)
    paths = [f"p/{number}" for number in range(5)]
    for path in paths:
        write_record(root / path, status="finished")
        write_rows(root / path, 1, range(1, 50))
    again = RunFollower(follower.database_path, root)
    for each in (follower, again):
        runs = each.find_runs()
        for run in [*runs, *runs]:  # one block of each run in turn, as the thread does
            each._read_or_warn(run)
        each._refresh_runs()
        assert [each.summary(each.runs[path])[0] for path in paths] == [49] * 5 and len(each._curves) <= 2


def test_active_runs_stay_in_memory(root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_module, "MAX_CACHED_RUNS", 2)
    paths = [f"p/{number}" for number in range(5)]
    for path in paths:
        write_record(root / path)
        write_rows(root / path, 1, range(1, 5))
    look(follower)
    curves = [follower.curves(follower.runs[path]) for path in paths]
    for path in paths:
        write_rows(root / path, 1, range(5, 7))
    look(follower)
    assert [follower.curves(follower.runs[path]) for path in paths] == curves
    assert [each.step for each in curves] == [6] * 5


def test_stopping_monitor_saves_curves(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    look(follower)
    follower.stop()
    assert MonitorDatabase(follower.database_path).runs()["p/e"].saved_state.step == 4


def test_curves_of_a_deleted_run_are_not_saved(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    look(follower)
    shutil.rmtree(root / "p/e")
    look(follower)
    follower.stop()
    saved = MonitorDatabase(follower.database_path)
    assert saved._connection.execute("SELECT count(*) FROM curves").fetchone()[0] == 0


def test_killed_run_does_not_count_as_running(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_record(root / "p/live")
    write_rows(root / "p/live", 1, range(1, 5))
    write_record(root / "p/silent")
    row = {"attempt": 1, "train/loss": 1.0}
    lines = [json.dumps({**row, "step": number, "time": time.time() - 3000 + number}) for number in range(1, 9)]
    (root / "p/silent/metrics.jsonl").write_text("\n".join(lines) + "\n")
    write_record(root / "p/validating")
    lines.append(json.dumps({"step": 8, "attempt": 1, "time": time.time() - 2900, "time/val/step_s": 2000.0}))
    (root / "p/validating/metrics.jsonl").write_text("\n".join(lines) + "\n")
    RunRecord(root / "p/launching").mark_waiting(launch={"heartbeat_s": 10.0})
    RunRecord(root / "p/queued").mark_waiting()
    monkeypatch.setattr(heartbeat, "DEAD_AFTER_S", 0.0)
    for each in (follower, RunFollower(follower.database_path, root)):
        look(each)
        look(each)
        assert {path: run.status for path, run in each.runs.items()} == {
            "p/launching": "killed", "p/live": "running", "p/queued": "waiting",
            "p/silent": "killed", "p/validating": "running",
        }  # fmt: skip
        assert "logged nothing for 29" in str(each.runs["p/silent"].exit_reason)


def test_slow_run_is_live_after_monitor_restart(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "IDLE_S", math.inf)  # so that nothing is saved before the restart
    write_record(root / "p/e")
    rows = [{"step": n, "attempt": 1, "time": time.time() - 6000 + 500 * n, "train/loss": 1.0} for n in range(1, 11)]
    (root / "p/e/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    follower.find_runs()
    follower._refresh_runs()
    assert follower.runs["p/e"].status == "running"  # its rows are not read yet
    look(follower)
    again = RunFollower(follower.database_path, root)  # the first one was killed, not stopped
    look(again)
    for each in (follower, again):
        assert each.runs["p/e"].status == "running" and each.summary(each.runs["p/e"])[0] == 10


def test_malformed_record_does_not_hide_other_runs(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    for name, attempts in (("a", None), ("b", [{"attempt": 1}]), ("c", [])):
        (root / name).mkdir()
        (root / name / "run.json").write_text(json.dumps({"status": "running", "attempts": attempts}))
    (root / "d").mkdir()
    (root / "d/run.json").write_text('{"status": "running"}')
    look(follower)
    assert {*follower.runs} == {"p/e", "a", "b", "c", "d"}


def change_attempt(run_dir: Path, **changes: Any) -> None:
    """Change the last attempt of a `run.json`."""
    record = json.loads((run_dir / "run.json").read_text())
    record["attempts"][-1] |= changes
    (run_dir / "run.json").write_text(json.dumps(record))


def test_invalid_pid_does_not_hide_other_runs(root: Path, follower: RunFollower) -> None:
    for name in ("e", "odd"):
        write_record(root / "p" / name)
        write_rows(root / "p" / name, 1, range(1, 5))
    change_attempt(root / "p/odd", host=socket.gethostname(), pid_namespace=pid_namespace(), pid="9" * 5000)
    look(follower)
    assert {path: run.status for path, run in follower.runs.items()} == {"p/e": "running", "p/odd": "running"}


def test_invalid_numbers_in_record_read_as_unknown(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    record = json.loads((root / "p/e/run.json").read_text())
    (root / "p/e/run.json").write_text(json.dumps({**record, "total_steps": "many"}))
    change_attempt(root / "p/e", first_step="late", world_size=1e300)
    look(follower)
    assert follower.runs["p/e"].total_steps is None and step(follower) == 4
    assert [*map(tuple, query(follower, "SELECT first_step, world_size FROM attempts"))] == [(None, None)]


def test_two_monitors_can_share_database(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    other = RunFollower(follower.database_path, root)
    look(follower)
    look(other)
    for last in (8, 12):
        write_rows(root / "p/e", 1, range(last - 3, last + 1))
        look(follower)  # reads the rows, and `other` finds them in the database
        look(other)
        assert step(follower) == step(other) == last and points(follower, "p/e") == points(other, "p/e")


def test_rows_not_stored_are_not_drawn(
    root: Path, follower: RunFollower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    look(follower)
    write_rows(root / "p/e", 1, range(5, 9))
    with monkeypatch.context() as patch:
        patch.setattr(follower._database, "advance_metrics", lambda *arguments: 1 / 0)
        look(follower)
    assert "cannot be followed: ZeroDivisionError" in capsys.readouterr().err
    assert step(follower) == 4 and count(follower, "training_logs") == 4
    look(follower)
    assert points(follower, "p/e")[0] == [*range(1, 9)]


def test_restarts_are_drawn_one_after_another(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e", a1=0)
    write_rows(root / "p/e", 1, range(1, 31))
    look(follower)
    write_record(root / "p/e", a1=0, a2=20, a3=0)
    write_rows(root / "p/e", 2, range(21, 26))
    write_rows(root / "p/e", 3, range(1, 4))
    look(follower)
    again = RunFollower(follower.database_path.with_name("other.sqlite"), root)
    look(again)
    for each in (follower, again):
        assert each.curves(each.runs["p/e"]).starts == {1: 0, 2: 30, 3: 35}
        assert points(each, "p/e") == ([*range(1, 39)], [*range(1, 31), *range(21, 26), 1, 2, 3])
        assert step(each) == 3


def test_each_event_is_logged_once(root: Path, follower: RunFollower) -> None:
    run_dir = root / "p/e"
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 21))
    event = {"step": 20, "attempt": 1, "time": 5.0, "name": "overfitting", "level": "warning"}
    lines = [json.dumps({**event, "text": "<b>val</b> rises"}), "no event", json.dumps({**event, "text": "still does"})]
    lines.append(json.dumps({**event, "name": "odd", "level": "notice", "text": "", "step": {}, "time": 1e300}))
    (run_dir / "events.jsonl").write_text("\n".join(lines) + "\n")
    look(follower)
    look(follower)
    found = [(row["kind"], row["text"]) for row in query(follower, "SELECT * FROM events ORDER BY id")]
    assert ("warning", "overfitting: <b>val</b> rises") in found
    assert [text for kind, text in found if kind == "step"] == ["loss 10", "loss 20"]
    assert [text for kind, text in found if kind == "start"] == ["attempt 1 began at step 0 on h, 2 ranks"]
    assert levels(follower) == {"overfitting": "warning", "odd": "notice"}
    write_record(run_dir, status="finished")
    look(follower)
    assert len(query(follower, "SELECT * FROM events WHERE kind = 'start'")) == 1


def test_steps_are_logged_at_log_every_of_run(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    (root / "p/e/config.yaml").write_text("trainer: {log_every: 4}\n")
    write_rows(root / "p/e", 1, range(1, 11))
    look(follower)
    texts = [event.text for _, event in follower.reader.last_events(follower.runs["p/e"].id, 0, 200)]
    assert texts[1:] == ["loss 4", "loss 8"]


def test_log_shows_reward_accuracy_and_latency() -> None:
    metrics = {"loss": 0.5, "reward_total_mean": 0.25, "accuracy_mean": 0.75, "latency_ms_mean": 31.0}
    for kind in ("train", "eval"):
        row = MetricsRow(10, 1, 0.0, {f"{kind}/{name}": value for name, value in metrics.items()})
        [event] = events_of_row(row)
        assert "reward 0.25, accuracy 0.75, latency ms 31" in event.text


@pytest.mark.parametrize("config", ["trainer: [1]", "trainer: often", "trainer: {log_every: often}"])
def test_invalid_configuration_does_not_hide_rows(config: str, root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    (root / "p/e/config.yaml").write_text(config)
    write_rows(root / "p/e", 1, range(1, 11))
    look(follower)
    assert step(follower) == 10


def write_evaluation(run_dir: Path, step: int, **datasets: Any) -> Path:
    path = run_dir / f"eval/eval_step_{step}/metrics.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step": step, "datasets": datasets}))
    return path


def test_evaluations_are_read_and_replaced(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    for rate in (0.5, 0.625):
        write_evaluation(root / "p/e", 40, gsm8k={"accepted_at_1": rate}, odd=["not metrics"])
        look(follower)
    write_evaluation(root / "p/e", 60, gsm8k={"accepted_at_1": 0.5})
    look(follower)
    run = follower.runs["p/e"]
    assert follower.reader.evaluations(run.id) == {"gsm8k": {40: {"accepted_at_1": 0.625}, 60: {"accepted_at_1": 0.5}}}
    assert run.accuracies["gsm8k"] == (0.625, 40)
    shutil.rmtree(root / "p/e/eval/eval_step_40")
    look(follower)
    assert follower.runs["p/e"].accuracies["gsm8k"] == (0.5, 60)
    for same in (80, 20):
        write_evaluation(root / "p/e", same, gsm8k={"accepted_at_1": 0.5})
        look(follower)
    assert follower.runs["p/e"].accuracies["gsm8k"] == (0.5, 80)  # the newest, as the evaluation chooses


def test_best_evaluation_is_that_of_the_selected_checkpoint(root: Path, follower: RunFollower) -> None:
    """It may be selected by another metric than the one that is shown."""
    write_record(root / "p/e")
    for step, rate in ((20, 0.5), (40, 0.25)):
        write_evaluation(root / "p/e", step, gsm8k={"accepted_at_1": rate})
    best = root / "p/e/best_checkpoint.json"
    found = []
    for text in ('{"step": 40}', '{"step": 20}', '{"step": 60}', '{"step": 1' + "0" * 30 + "}", '{"step": 40}', None):
        best.unlink(missing_ok=True)
        if text is not None:
            best.write_text(text)
        look(follower)
        found.append(follower.runs["p/e"].accuracies.get("gsm8k"))
    assert found == [(0.25, 40), (0.5, 20), None, (0.5, 20), (0.25, 40), (0.5, 20)] and follower.problems == {}


def test_origin_of_run_is_read_from_its_configuration(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/sft")
    write_record(root / "p/grpo")
    look(follower)
    assert follower.runs["p/grpo"].origin == ""
    export = "/mnt/cluster/p/sft/global_step_40/huggingface"
    (root / "p/grpo/config.yaml").write_text(f"model: {{partial_pretrain: {export}, sft_run: null}}\n")
    look(follower)
    assert follower.runs["p/grpo"].origin == export
    (root / "p/grpo/config.yaml").write_text("model: [damaged]\n")
    look(follower)
    assert follower.runs["p/grpo"].origin == ""


def test_unchanged_evaluations_are_not_reread(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_evaluation(root / "p/e", 4, gsm8k={"accepted_at_1": 0.5, "notes": "x" * (1 << 20)})
    look(follower)
    again = RunFollower(follower.database_path, root)
    before = bytes_read()
    again.find_runs()
    assert bytes_read() - before < 1 << 19


def bytes_read() -> int:
    """Bytes read by this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_directories_with_invalid_records_are_ignored(root: Path, follower: RunFollower) -> None:
    for name, text in (("torn", '{"status": "run'), ("list", "[]"), ("other", '{"status": "dancing"}')):
        (root / name).mkdir(parents=True)
        (root / name / "run.json").write_text(text)
    look(follower)
    assert follower.runs == {} and follower.problems == {"torn/run.json": "not JSON"}
    for name in ("list", "other", "none"):  # runs, because they have metrics
        write_rows(root / name, 1, range(1, 3))
    look(follower)
    assert follower.runs == {} and follower.problems == {
        "torn/run.json": "not JSON", "list/run.json": "not a run record", "other/run.json": "its status is unknown",
        "none/run.json": "it is missing",
    }  # fmt: skip


def test_file_that_cannot_be_read_is_reported(root: Path, follower: RunFollower) -> None:
    for name in ("e", "odd"):
        write_record(root / "p" / name)
    (root / "p/e/metrics.jsonl").mkdir()
    (root / "p/odd/run.json").write_text('{"status": "finished", "attempts": 5}')
    look(follower)
    reasons = {"p/e/metrics.jsonl": "Is a directory", "p/odd/run.json": "not a run record"}
    assert follower.problems == reasons and [*follower.runs] == ["p/e"]
    assert follower.problems_of(follower.runs["p/e"]) == {"metrics.jsonl": "Is a directory"}
    (root / "p/e/metrics.jsonl").rmdir()
    (root / "p/odd/run.json").unlink()
    look(follower)
    assert follower.problems == {}


def test_row_with_bare_nan_is_read(root: Path, follower: RunFollower) -> None:
    """As `json.dumps` of other programs writes it."""
    write_record(root / "p/e")
    rows = [{"step": n, "attempt": 1, "time": 1.0, "train/loss": math.nan if n == 2 else 1.0} for n in (1, 2, 3)]
    (root / "p/e/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    look(follower)
    run = follower.runs["p/e"]
    assert (step(follower), run.unreadable) == (3, 0) and follower.curves(run).gaps == {"train/loss": [2.0]}
    assert math.isnan([*follower.reader.rows(run.id)][1].metrics["train/loss"])


def test_csv_has_every_row_and_metric_but_no_formula(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 3))
    write_rows(root / "p/e", 1, range(3, 4), **{"=cmd, x": math.inf})
    look(follower)
    lines = [line.rstrip("\n") for line in csv_lines(follower.database_path, follower.runs["p/e"].id)]
    assert lines[0] == 'step,attempt,time,train/loss,"train/=cmd, x"' and len(lines) == 4
    assert lines[1].startswith("1,1,") and lines[1].endswith(",1.0,") and lines[3].endswith(",3.0,Infinity")


def test_run_at_root_can_be_downloaded(root: Path, follower: RunFollower) -> None:
    write_record(root)
    write_rows(root, 1, range(1, 3))
    look(follower)
    response = csv_response(follower, "")
    assert response.status_code == 200 and response.headers["Content-Disposition"].endswith("metrics_checkpoints.csv")
    assert csv_response(follower, "p/e").status_code == 404


def test_database_is_in_user_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = database_for(tmp_path / "a"), database_for(tmp_path / "b")
    assert first != second and first.is_relative_to(tmp_path / "verl_ext")
    (tmp_path / "file").write_text("no database" * 100)
    with pytest.raises(UserError, match="--database"):
        MonitorDatabase(tmp_path / "file")


def test_database_of_another_version_is_reset(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "old.sqlite")
    tables = "CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT); CREATE TABLE events (run INTEGER);"
    old.executescript(f"{tables} PRAGMA user_version=999")
    old.close()
    assert MonitorDatabase(tmp_path / "old.sqlite").runs() == {}


def test_database_of_another_program_is_kept(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.executescript("CREATE TABLE jobs (state TEXT); INSERT INTO jobs VALUES ('done')")
    with pytest.raises(UserError, match="other.sqlite is the database of another program; set another --database"):
        MonitorDatabase(tmp_path / "other.sqlite")
    assert other.execute("SELECT state FROM jobs").fetchall() == [("done",)]
    other.close()


def test_summary_has_latest_values_and_time_left(root: Path, follower: RunFollower) -> None:
    run_dir = root / "p/e"
    write_record(run_dir, total_steps=200)
    rows = [{"step": step, "attempt": 1, "time": 10.0 * step, "train/loss": 1.0 / step} for step in range(1, 101)]
    rows.append({"step": 100, "attempt": 1, "time": 1000.0, "val/loss": 0.5})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    look(follower)
    run = follower.runs["p/e"]
    assert run.total_steps == 200 and follower.curves(run).seconds_left(200) == 1000.0
    assert follower.summary(run) == (100, {"train/loss": 0.01, "val/loss": 0.5})
    assert points(follower, "p/e", "val/loss") == ([100], [0.5])


def test_invalid_values_do_not_disturb_other_rows(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    rows: list[dict[str, Any]] = [{"train/loss": float(step)} for step in range(1, 7)]
    rows[2] |= {"time/train/save_s": 1.0, "odd": [1, 2]}
    rows[3] |= {"train/loss": {"not": "a number"}}
    rows[4] |= {"train/loss": "Infinity", "odd": [3, 4]}
    lines = [json.dumps({"step": n, "attempt": 1, "time": 1.0, **row}) for n, row in enumerate(rows, start=1)]
    lines.append('{"step": 7, "attempt": 1, "time": "NaN", "train/loss": 7}')
    (root / "p/e/metrics.jsonl").write_text("\n".join(lines) + "\n")
    look(follower)
    assert points(follower, "p/e") == ([1, 2, 3, 6], [1, 2, 3, 6]) and follower.runs["p/e"].unreadable == 1
    assert "odd" not in follower.curves(follower.runs["p/e"]).envelopes


def test_deleted_or_recreated_runs_leave_no_old_data(root: Path, follower: RunFollower) -> None:
    run_dir = root / "p/e"
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 41))
    write_evaluation(run_dir, 40, gsm8k={"accepted_at_1": 0.5})
    event = {"step": 20, "attempt": 1, "time": 5.0, "name": "old", "level": "alarm", "text": "rises"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    look(follower)
    run = follower.runs["p/e"].id
    shutil.rmtree(run_dir)
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 3))
    (run_dir / "events.jsonl").write_text(json.dumps({**event, "name": "new", "text": "longer than before"}) + "\n")
    look(follower)
    assert follower.runs["p/e"].id == run and count(follower, "training_logs") == 2
    look(follower)
    assert count(follower, "evaluations") == 0 and levels(follower) == {"new": "alarm"}
    told = [row["text"] for row in query(follower, "SELECT * FROM events WHERE kind = 'alarm'")]
    assert told == ["new: longer than before"]
    shutil.rmtree(run_dir)
    look(follower)
    assert follower.runs == {}
    tables = ("runs", "training_logs", "curves", "events", "attempts", "evaluations")
    assert [count(follower, table) for table in tables] == [0] * 6


def test_new_run_never_reuses_id_of_deleted_run(root: Path, follower: RunFollower) -> None:
    """Curves in memory and open logs belong to an ID."""
    write_record(root / "p/old")
    write_rows(root / "p/old", 1, range(1, 51))
    look(follower)
    old = follower.runs["p/old"]
    assert step(follower, "p/old") == 50
    [last_event] = query(follower, "SELECT max(id) FROM events")[0]
    shutil.rmtree(root / "p/old")
    write_record(root / "p/new")
    write_rows(root / "p/new", 1, range(1, 4))
    look(follower)
    assert points(follower, "p/new")[0] == [1, 2, 3]
    shutil.rmtree(root / "p/new")
    look(follower)
    write_record(root / "p/newest")
    write_rows(root / "p/newest", 1, range(1, 6))
    look(follower)
    assert follower.runs["p/newest"].id > old.id and points(follower, "p/newest")[0] == [1, 2, 3, 4, 5]
    assert query(follower, "SELECT min(id) FROM events")[0][0] > last_event


@pytest.mark.parametrize("unreadable", [".", "p", "p/e"])
def test_unlistable_directory_loses_no_run(
    unreadable: str,
    root: Path,
    follower: RunFollower,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("p/e", "q/e"):
        write_record(root / name)
        write_rows(root / name, 1, range(1, 6))
    look(follower)
    ids, scandir = {path: run.id for path, run in follower.runs.items()}, os.scandir

    def fail(path: str) -> object:
        if Path(path) == root / unreadable:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return scandir(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        found = [follower.find_runs(), follower.find_runs()]
        look(follower)
    assert found == ([[], []] if unreadable == "." else [[ids["q/e"]], [ids["q/e"]]])
    assert step(follower) == 5 and count(follower, "training_logs") == 10
    assert capsys.readouterr().err.count(f"{root / unreadable} cannot be listed (Stale file handle)") == 1
    assert follower.find_runs() == [ids["p/e"], ids["q/e"]]
    shutil.rmtree(root / "p")
    assert follower.find_runs() == [ids["q/e"]]


def test_briefly_missing_root_loses_no_run(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    look(follower)
    run = follower.runs["p/e"].id
    root.rename(root.with_name("elsewhere"))
    look(follower)
    assert [*follower.runs] == ["p/e"]
    root.with_name("elsewhere").rename(root)
    assert follower.find_runs() == [run]


def test_unreadable_run_is_shown_as_last_read(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 6))
    look(follower)
    (root / "p/e/run.json").write_text('{"status": "finished", "attempts": ["a"]}')
    look(follower)
    assert step(follower) == 5 and follower.runs["p/e"].status == "running"


def test_bad_run_does_not_hide_others(root: Path, follower: RunFollower, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(root / "p/good")
    write_rows(root / "p/good", 1, range(1, 4))
    (root / "bad").mkdir()
    (root / "bad/run.json").write_text('{"status": "finished", "attempts": ["a"]}')
    write_record(root / "p/huge")
    (root / "p/huge/metrics.jsonl").write_text('{"step": 1e30, "attempt": 1, "time": 1.0, "train/loss": 1.0}\n' * 2)
    look(follower)
    look(follower)
    assert {*follower.runs} == {"p/good", "p/huge"} and count(follower, "training_logs") == 3
    assert capsys.readouterr().err.count("bad/run.json cannot be read (not a run record)") == 1


# The thread


@pytest.fixture
def idle_follower(follower: RunFollower, monkeypatch: pytest.MonkeyPatch) -> RunFollower:
    """A follower of two runs without new rows."""
    monkeypatch.setattr(follower, "find_runs", lambda: [1, 2])
    monkeypatch.setattr(follower._database, "live_runs", lambda: [1, 2])
    monkeypatch.setattr(follower, "read_new_rows", lambda run: False)
    return follower


def follow_until(is_over: Callable[[], bool], follower: RunFollower) -> None:
    """Run the follower until a condition holds."""
    follower.start()
    wait_until(is_over)
    assert follower.is_alive()
    follower.stop()


def test_failing_read_does_not_block_other_runs(
    idle_follower: RunFollower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read: list[int] = []

    def read_new_rows(run: int) -> bool:
        read.append(run)
        if run == 1:
            raise OSError("a bad sector")
        return False

    monkeypatch.setattr(idle_follower, "read_new_rows", read_new_rows)
    follow_until(lambda: min(read.count(1), read.count(2)) >= 3, idle_follower)
    assert capsys.readouterr().err.count("run 1 cannot be followed: OSError: a bad sector") == 1


def test_failed_search_for_runs_is_retried(
    idle_follower: RunFollower, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[int] = []

    def live_runs() -> list[int]:
        looks.append(1)
        if len(looks) < 4:
            raise OSError("the database is locked")
        return []

    monkeypatch.setattr(idle_follower._database, "live_runs", live_runs)
    follow_until(lambda: len(looks) >= 5, idle_follower)
    assert capsys.readouterr().err.count("cannot search for runs: OSError: the database is locked") == 1
