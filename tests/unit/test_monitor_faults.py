"""The monitor's follower with runs that are damaged, deleted or cannot be read."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from tests.helpers.processes import wait_until
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.sample_rows import sample_sources
from verl_ext.processes import pid_namespace


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def follower(tmp_path: Path, root: Path) -> RunFollower:
    return RunFollower(tmp_path / "cache/monitor.sqlite", root)


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
    assert follower.runs["p/e"].total_steps is None and step_of(follower) == 4
    assert [*map(tuple, query(follower, "SELECT first_step, world_size FROM attempts"))] == [(None, None)]


@pytest.mark.parametrize("config", ["trainer: [1]", "trainer: often", "trainer: {log_every: often}"])
def test_invalid_configuration_does_not_hide_rows(config: str, root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    (root / "p/e/config.yaml").write_text(config)
    write_rows(root / "p/e", 1, range(1, 11))
    look(follower)
    assert step_of(follower) == 10


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
    assert (step_of(follower), run.unreadable) == (3, 0) and follower.curves(run).gaps == {"train/loss": [2.0]}
    assert math.isnan([*follower.reader.rows(run.id)][1].metrics["train/loss"])


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
    assert step_of(follower, "p/old") == 50
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
    assert step_of(follower) == 5 and count(follower, "training_logs") == 10
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
    assert step_of(follower) == 5 and follower.runs["p/e"].status == "running"


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


def test_directory_that_is_not_utf8_does_not_hide_other_runs(root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    write_record(root / os.fsdecode(b"bad_\xff"))
    write_rows(root / os.fsdecode(b"bad_\xff"), 1, range(1, 3))
    for name in (b"few_qa.jsonl", b"\xff_qa.jsonl"):
        path = root / "p/e/eval/eval_step_8/qa_logs" / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    look(follower)
    assert follower.problems == {"bad_\\xff/run.json": "its path is not UTF-8"} and [*follower.runs] == ["p/e"]
    assert [*sample_sources(root / "p/e").values()] == ["few · step 8"]


@pytest.mark.parametrize("text", ['{"datasets": {"a": {"rate": NaN}}}', '{"datasets": {"a": 1e400}}', '{"datasets": {'])
def test_unreadable_evaluation_is_reported_once_it_is_settled(text: str, root: Path, follower: RunFollower) -> None:
    write_record(root / "p/e")
    path = write_evaluation(root / "p/e", 8)
    path.write_text(text)
    other = write_evaluation(root / "p/e", 16)
    other.write_text("[1]")
    os.utime(other, (1e9, 1e9))
    look(follower)
    assert follower.problems == {}, "one may be incomplete, and the other is another kind of file"
    os.utime(path, (1e9, 1e9))
    look(follower)
    assert follower.problems == {"p/e/eval/eval_step_8/metrics.json": "not JSON"}
    assert follower.problems_of(follower.runs["p/e"]) == {"eval/eval_step_8/metrics.json": "not JSON"}
    write_evaluation(root / "p/e", 8, gsm8k={"accepted_at_1": 0.5})
    look(follower)
    assert follower.problems == {} and count(follower, "evaluations") == 1
    path.write_text(text)
    os.utime(path, (1e9, 1e9))
    look(follower)
    assert len(follower.problems) == 1
    shutil.rmtree(path.parent)
    look(follower)
    assert follower.problems == {}
