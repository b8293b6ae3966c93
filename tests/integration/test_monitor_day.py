"""A day of ten steps a second: neither what the page holds nor the work of its queries grows with the run."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from tests.helpers.monitor import write_record
from verl_ext.monitor.curves.overview import MOST_POINTS
from verl_ext.monitor.store.database import open_database
from verl_ext.monitor.store.ingest import Ingest
from verl_ext.monitor.view import RunView

STEPS = 24 * 3600 * 10
HOUR = STEPS // 24
METRICS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "time/train/step_s")


def write_steps(path: Path, begin: int, end: int) -> None:
    with open(path, "a") as file:
        for step in range(begin + 1, end + 1):
            values = ", ".join(f'"{name}": {step % 97 / 97}' for name in METRICS)
            file.write(f'{{"step": {step}, "attempt": 1, "time": {step / 10}, {values}}}\n')


def work(connection: sqlite3.Connection, view: RunView) -> int:
    """Hundreds of SQLite's virtual machine's instructions of one update of the page."""
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    connection.set_progress_handler(note, 100)
    assert view.refresh()
    for metric in METRICS:
        assert len(view.curve(metric).points()[0]) <= MOST_POINTS
    connection.set_progress_handler(None, 0)
    return count


def held(view: RunView) -> int:
    """Bytes of the curves that a page holds."""
    return sum(each._parts.nbytes + each._open.nbytes for each in view._overviews.values())


def test_a_day_costs_what_an_hour_costs(tmp_path: Path) -> None:
    run_dir = tmp_path / "checkpoints/p/e"
    write_record(run_dir, total_steps=STEPS)
    ingest = Ingest(open_database(tmp_path / "monitor.sqlite"), tmp_path / "checkpoints")
    reader = open_database(tmp_path / "monitor.sqlite")
    write_steps(run_dir / "metrics.jsonl", 0, 3)
    [run] = ingest.find_runs()
    ingest.take_all(run)
    view = RunView(reader, run, tmp_path / "checkpoints")
    works, sizes, done = [], [], 3
    for hour in range(1, 25):
        write_steps(run_dir / "metrics.jsonl", done, hour * HOUR - 3)
        ingest.take_all(run)
        view.refresh()
        write_steps(run_dir / "metrics.jsonl", hour * HOUR - 3, hour * HOUR)  # what 0.3 s bring
        ingest.take_all(run)
        works.append(work(reader, view))
        sizes.append(held(view))
        done = hour * HOUR
    assert view.standing().step == STEPS and view.curve("train/loss").num_points == STEPS
    assert max(works) <= 1.5 * works[0], works
    assert max(sizes[12:]) <= 1.2 * max(sizes[:12]) and max(sizes) < 1_000_000, sizes
    [count] = reader.execute("SELECT count(*) FROM training_logs").fetchone()
    assert count == STEPS  # none is lost
    assert json.loads(reader.execute("SELECT metrics FROM training_logs WHERE step = 7").fetchone()[0])
