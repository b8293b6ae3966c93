"""The monitor's follower and its database: what they read from run files, and what pages get."""

from __future__ import annotations

import json
import math
import shutil
import socket
import sqlite3
import time
from pathlib import Path

import pytest

from tests.helpers.monitor import (
    count,
    levels,
    look,
    points,
    query,
    step_of,
    write_evaluation,
    write_record,
    write_rows,
)
from verl_ext.errors import UserError
from verl_ext.metrics import heartbeat
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.metrics.run_record import RunRecord
from verl_ext.monitor import follower as follower_module
from verl_ext.monitor import run_files
from verl_ext.monitor.charts import schedule_points
from verl_ext.monitor.database import MonitorDatabase, database_for
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.overview import num_alarms, worst_level
from verl_ext.monitor.run_files import events_of_row, run_directories
from verl_ext.monitor.server import csv_blocks, csv_lines, csv_response


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def follower(tmp_path: Path, root: Path) -> RunFollower:
    return RunFollower(tmp_path / "cache/monitor.sqlite", root)


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
    assert step_of(follower) == 49
    (root / "p/e/metrics.jsonl").unlink()
    write_rows(root / "p/e", 1, range(1, 4), grad_norm=2.0)
    look(follower)
    assert count(follower, "training_logs") == 3
    assert step_of(follower) == 3 and points(follower, "p/e") == ([1, 2, 3], [1, 2, 3])


def test_runs_behind_links_are_found_once(root: Path, tmp_path: Path) -> None:
    for path in ("checkpoints/p/e", "elsewhere/q/linked", "elsewhere/single", "data/run"):
        write_record(tmp_path / path)
    (root / "q").symlink_to(tmp_path / "elsewhere/q")
    (root / "p/single").symlink_to(tmp_path / "elsewhere/single")
    (root / "a").symlink_to(root / "p")
    (root / "up").symlink_to("..")
    (root / "self").symlink_to("self")
    (root / "gone").symlink_to(tmp_path / "nothing")
    (root / "p/circle").symlink_to(root)
    (tmp_path / "elsewhere/q/circle").symlink_to(tmp_path / "elsewhere")
    (root / "p/e/data").symlink_to(tmp_path / "data")
    found, errors = run_directories(root)
    assert (found, errors) == ([root / path for path in ("p/e", "p/single", "q/linked")], [])


def test_outputs_of_runs_are_not_searched(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ["global_step_ablation/wandb_sweep", "p/e", "p/e/nested", "p/wandb-test", "wandb/e"]
    outputs = ["p/e/eval/eval_step_1", "p/e/global_step_1", "p/e/tensorboard", "p/e/wandb/run-1", "q/global_step_2.tmp"]
    for path in [*runs, *outputs]:
        write_record(root / path)
    assert run_directories(root) == ([root / path for path in runs], [])


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
    assert again.curves(again.runs["p/e"]).starts == {1: 0, 2: 6000} and step_of(again) == 5040
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
        assert step_of(follower) == step_of(other) == last and points(follower, "p/e") == points(other, "p/e")


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
    assert step_of(follower) == 4 and count(follower, "training_logs") == 4
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
        assert step_of(each) == 3


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


def test_finding_of_discarded_steps_is_not_current(root: Path, follower: RunFollower) -> None:
    run_dir = root / "p/e"
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 31))
    event = {"attempt": 1, "time": time.time(), "text": ""}
    lines = [
        {"step": 10, "name": "overfitting", "level": "warning", **event},
        {"step": 30, "name": "overfitting", "level": "ok", **event},
        {"step": 30, "name": "loss_not_finite", "level": "alarm", **event},
    ]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    look(follower)
    assert levels(follower) == {"overfitting": "ok", "loss_not_finite": "alarm"} and num_alarms(follower.runs) == 1
    write_record(run_dir, a1=0, a2=20)
    look(follower)
    assert levels(follower) == {"overfitting": "warning"} and num_alarms(follower.runs) == 0
    assert worst_level(follower.runs["p/e"]) == "warning"
    write_record(run_dir, a1=0, a2=20, a3=30)  # the second one logged nothing
    look(follower)
    assert levels(follower) == {"overfitting": "ok", "loss_not_finite": "alarm"}


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


def test_csv_has_every_row_and_metric_but_no_formula(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 3))
    write_rows(root / "p/e", 1, range(3, 4), **{"=cmd, x": math.inf})
    look(follower)
    lines = [line.rstrip("\n") for line in csv_lines(follower.database_path, follower.runs["p/e"].id)]
    assert lines[0] == 'step,attempt,time,train/loss,"train/=cmd, x"' and len(lines) == 4
    assert lines[1].startswith("1,1,") and lines[1].endswith(",1.0,") and lines[3].endswith(",3.0,Infinity")


def test_csv_is_sent_in_blocks(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 2500))
    look(follower)
    place = follower.database_path, follower.runs["p/e"].id
    blocks = [*csv_blocks(*place)]
    assert [block.count("\n") for block in blocks] == [1000, 1000, 500] and "".join(blocks) == "".join(
        csv_lines(*place)
    )


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
    monkeypatch.setattr(socket, "gethostname", lambda: "another")  # with the same home directory
    assert database_for(tmp_path / "a") != first
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
