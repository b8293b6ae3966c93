"""The monitor's database: what it takes from files, and what comes back out of it."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.monitor import write_record, write_rows
from verl_ext.errors import UserError
from verl_ext.monitor.csv_file import csv_lines
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.store.columns import PACKED_ROWS, Points, unpack
from verl_ext.monitor.store.database import database_for, open_database
from verl_ext.monitor.store.ingest import Ingest
from verl_ext.monitor.view import RunView

DATABASE = "cache/monitor.sqlite"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def connection(tmp_path: Path) -> sqlite3.Connection:
    return open_database(tmp_path / DATABASE)


def take(connection: sqlite3.Connection, root: Path) -> list[int]:
    ingest = Ingest(connection, root)
    runs = ingest.find_runs()
    for run in runs:
        ingest.take_all(run)
    return runs


def count(connection: sqlite3.Connection, table: str) -> int:
    return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def test_rows_are_taken_once_and_only_whole_ones(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 6))
    path = root / "p/e/metrics.jsonl"
    with open(path, "a") as file:
        file.write('{"step": 6, "attempt": 1, "ti')
    assert len(take(connection, root)) == 1 and count(connection, "training_logs") == 5
    with open(path, "a") as file:
        file.write('me": 6.0, "train/loss": "NaN"}\nnot a row\n')
    take(connection, root)
    take(connection, root)
    found = connection.execute("SELECT attempt, step, metrics FROM training_logs ORDER BY id").fetchall()
    assert [(row["attempt"], row["step"]) for row in found] == [(1, step) for step in range(1, 7)]
    assert json.loads(found[-1]["metrics"]) == {"train/loss": "NaN"}
    assert connection.execute("SELECT unreadable FROM runs").fetchone()[0] == 1


def test_another_file_in_its_place_is_read_anew(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 50))
    [run] = take(connection, root)
    view = RunView(connection, run, root)
    assert view.standing().step == 49
    (root / "p/e/metrics.jsonl").unlink()
    write_rows(root / "p/e", 1, range(1, 4), grad_norm=2.0)
    take(connection, root)
    assert count(connection, "training_logs") == 3
    assert view.refresh() and view.standing().step == 3 and len(view.curve("train/loss").points()[0]) == 3


def test_a_run_is_never_written_into(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 5))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}
    RunView(connection, take(connection, root)[0], root).schedule()
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in root.rglob("*") if path.is_file()}


def test_columns_and_rows_give_one_curve(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    many = 2 * PACKED_ROWS + 10
    write_rows(root / "p/e", 1, range(1, many + 1), grad_norm=1.5)
    [run] = take(connection, root)
    packed = Points.join(list(unpack(connection, run, "train/loss", many)))
    assert packed.steps.tolist() == list(range(1, 2 * PACKED_ROWS + 1)) and (packed.attempts == 1).all()
    view = RunView(connection, run, root)
    assert view.curve("train/loss").num_points == many and view.curve("train/loss").last == (many, many)
    write_rows(root / "p/e", 1, range(many + 1, many + PACKED_ROWS))  # a part of it is packed while the page is open
    take(connection, root)
    assert view.refresh() and not view.refresh()
    assert view.curve("train/loss").num_points == many + PACKED_ROWS - 1
    assert view.curve("train/grad_norm").num_points == many


def test_restarts_lie_one_behind_the_other(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e", a1=0)
    write_rows(root / "p/e", 1, range(1, 31))
    [run] = take(connection, root)
    view = RunView(connection, run, root)
    write_record(root / "p/e", a1=0, a2=20, a3=0)
    write_rows(root / "p/e", 2, range(21, 26))
    write_rows(root / "p/e", 3, range(1, 4))
    take(connection, root)
    view.refresh()
    for each in (view, RunView(connection, run, root)):
        assert each.starts == {1: 0, 2: 30, 3: 35}
        x, values = each.curve("train/loss").points()
        assert x.tolist() == list(range(1, 39)) and values.tolist() == [*range(1, 31), *range(21, 26), 1, 2, 3]
    assert view.standing().step == 3


def test_what_happened_is_told_once(root: Path, connection: sqlite3.Connection) -> None:
    run_dir = root / "p/e"
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 21))
    event = {
        "step": 20,
        "attempt": 1,
        "time": 5.0,
        "name": "overfitting",
        "level": "warning",
        "text": "<b>val</b> rises",
    }
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\nno event\n")
    take(connection, root)
    take(connection, root)
    found = [(row["kind"], row["text"]) for row in connection.execute("SELECT * FROM events ORDER BY id")]
    assert ("warning", "overfitting: <b>val</b> rises") in found
    assert [text for kind, text in found if kind == "step"] == ["loss 10", "loss 20"]
    assert [text for kind, text in found if kind == "start"] == ["attempt 1 began at step 0 on h, 2 ranks"]


def test_evaluations_are_taken_and_replaced(root: Path, connection: sqlite3.Connection) -> None:
    run_dir = root / "p/e"
    write_record(run_dir)
    path = run_dir / "eval/eval_step_40/metrics.json"
    path.parent.mkdir(parents=True)
    for rate in (0.5, 0.75):
        path.write_text(json.dumps({"step": 40, "datasets": {"gsm8k": {"accepted_at_1": rate}}}))
        take(connection, root)
    [row] = connection.execute("SELECT * FROM evaluations").fetchall()
    assert (row["step"], row["dataset"], json.loads(row["figures"])) == (40, "gsm8k", {"accepted_at_1": 0.75})


def test_what_is_no_run_is_left_alone(root: Path, connection: sqlite3.Connection) -> None:
    for name, text in (("torn", '{"status": "run'), ("list", "[]"), ("other", '{"status": "dancing"}')):
        (root / name).mkdir(parents=True)
        (root / name / "run.json").write_text(text)
    assert take(connection, root) == []


def test_csv_has_every_row_and_metric_and_no_formula(
    root: Path, connection: sqlite3.Connection, tmp_path: Path
) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 3))
    write_rows(root / "p/e", 1, range(3, 4), **{"=cmd, x": math.inf})
    [run] = take(connection, root)
    lines = [line.rstrip("\n") for line in csv_lines(tmp_path / DATABASE, run)]
    assert lines[0] == 'step,attempt,time,train/loss,"train/=cmd, x"' and len(lines) == 4
    assert lines[1].startswith("1,1,") and lines[1].endswith(",1.0,") and lines[3].endswith(",3.0,Infinity")


def test_the_database_lies_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = database_for(tmp_path / "a"), database_for(tmp_path / "b")
    assert first != second and first.is_relative_to(tmp_path / "verl_ext")
    (tmp_path / "file").write_text("no database" * 100)
    with pytest.raises(UserError, match="--database"):
        open_database(tmp_path / "file")


def test_a_database_of_another_version_is_made_anew(tmp_path: Path) -> None:
    old = sqlite3.connect(tmp_path / "old.sqlite")
    old.executescript("CREATE TABLE runs (id INTEGER PRIMARY KEY AUTOINCREMENT); PRAGMA user_version=999")
    old.close()
    assert count(open_database(tmp_path / "old.sqlite"), "training_logs") == 0


def test_the_latest_figures_and_the_time_left(root: Path, connection: sqlite3.Connection) -> None:
    run_dir = root / "p/e"
    write_record(run_dir, total_steps=200)
    rows = [{"step": step, "attempt": 1, "time": 10.0 * step, "train/loss": 1.0 / step} for step in range(1, 101)]
    rows.append({"step": 100, "attempt": 1, "time": 1000.0, "val/loss": 0.5})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    view = RunView(connection, take(connection, root)[0], root)
    standing = view.standing()
    assert (standing.step, standing.total_steps, standing.seconds_left) == (100, 200, 1000.0)
    assert standing.latest == {"train/loss": 0.01, "val/loss": 0.5}
    assert np.isclose(view.curve("val/loss").last, (100, 0.5)).all()


def test_runs_that_go_or_come_anew_leave_nothing_behind(root: Path, connection: sqlite3.Connection) -> None:
    run_dir, ingest = root / "p/e", Ingest(connection, root)
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 41))
    path = run_dir / "eval/eval_step_40/metrics.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"datasets": {"gsm8k": {"accepted_at_1": 0.5}}}))
    event = {"step": 20, "attempt": 1, "time": 5.0, "name": "old", "level": "alarm", "text": "rises"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    [run] = take(connection, root)
    shutil.rmtree(run_dir)
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 3))
    (run_dir / "events.jsonl").write_text(json.dumps({**event, "name": "new", "text": "longer than before"}) + "\n")
    assert take(connection, root) == [run] and count(connection, "training_logs") == 2
    take(connection, root)
    assert count(connection, "evaluations") == 0
    told = [row["text"] for row in connection.execute("SELECT * FROM events WHERE kind = 'alarm'")]
    assert told == ["new: longer than before"]
    view = RunView(connection, run, root)
    shutil.rmtree(run_dir)
    assert ingest.find_runs() == [] and not view.refresh()
    assert [count(connection, table) for table in ("runs", "training_logs", "events", "attempts")] == [0, 0, 0, 0]


def test_new_run_never_takes_the_identity_of_a_deleted_one(root: Path, connection: sqlite3.Connection) -> None:
    """Open pages keep curves, logs and links by the run's id."""
    write_record(root / "p/old")
    write_rows(root / "p/old", 1, range(1, 51))
    [old] = take(connection, root)
    context = PageContext(connection, root, {})
    assert context.chosen is not None and context.chosen.standing().step == 50
    [last_event] = connection.execute("SELECT max(id) FROM events").fetchone()
    shutil.rmtree(root / "p/old")
    write_record(root / "p/new")
    write_rows(root / "p/new", 1, range(1, 4))
    take(connection, root)  # reads the new run before it forgets the old one
    shutil.rmtree(root / "p/new")
    take(connection, root)
    write_record(root / "p/newest")
    write_rows(root / "p/newest", 1, range(1, 6))
    [newest] = take(connection, root)
    view = context.chosen
    assert newest > old and view is not None and view.directory == root / "p/newest"
    assert view.standing().step == 5 and len(view.curve("train/loss").points()[0]) == 5
    assert connection.execute("SELECT min(id) FROM events").fetchone()[0] > last_event


@pytest.mark.parametrize("unreadable", [".", "p", "p/e"])
def test_directory_that_cannot_be_listed_costs_no_run(
    unreadable: str,
    root: Path,
    connection: sqlite3.Connection,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("p/e", "q/e"):
        write_record(root / name)
        write_rows(root / name, 1, range(1, 6))
    [run, other] = take(connection, root)
    view, scandir = RunView(connection, run, root), os.scandir

    def fail(path: str) -> object:
        if Path(path) == root / unreadable:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return scandir(path)

    ingest = Ingest(connection, root)
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", fail)
        found = [ingest.find_runs(), ingest.find_runs()]
    assert found == ([[], []] if unreadable == "." else [[other], [other]])
    assert view.refresh() is False and view.standing().step == 5 and count(connection, "training_logs") == 10
    assert capsys.readouterr().err.count(f"{root / unreadable} cannot be listed (Stale file handle)") == 1
    assert ingest.find_runs() == [run, other]
    shutil.rmtree(root / "p")
    assert ingest.find_runs() == [other]


def test_root_that_is_gone_for_one_look_costs_no_run(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    runs = take(connection, root)
    root.rename(root.with_name("elsewhere"))
    assert take(connection, root) == [] and count(connection, "runs") == 1
    root.with_name("elsewhere").rename(root)
    assert take(connection, root) == runs


def test_run_that_can_no_longer_be_read_is_shown_as_last_read(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    write_rows(root / "p/e", 1, range(1, 6))
    take(connection, root)
    (root / "p/e/run.json").write_text('{"status": "finished", "attempts": ["a"]}')
    take(connection, root)
    assert count(connection, "runs") == 1 and count(connection, "training_logs") == 5


def test_one_bad_run_does_not_hide_the_others(
    root: Path, connection: sqlite3.Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(root / "p/good")
    write_rows(root / "p/good", 1, range(1, 4))
    (root / "bad").mkdir()
    (root / "bad/run.json").write_text('{"status": "finished", "attempts": ["a"]}')
    write_record(root / "p/huge")
    (root / "p/huge/metrics.jsonl").write_text('{"step": 1e30, "attempt": 1, "time": 1.0, "train/loss": 1.0}\n' * 2)
    runs = take(connection, root)
    take(connection, root)
    assert len(runs) == 2 and count(connection, "training_logs") == 3
    assert capsys.readouterr().err.count("bad cannot be followed") == 2  # once by each of two


def test_an_attempt_begins_once_in_the_log(root: Path, connection: sqlite3.Connection) -> None:
    write_record(root / "p/e")
    take(connection, root)
    write_record(root / "p/e", status="finished")
    take(connection, root)
    assert connection.execute("SELECT count(*) FROM events WHERE kind = 'start'").fetchone()[0] == 1
