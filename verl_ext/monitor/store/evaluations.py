"""Figures of a run's evaluated checkpoints, from `eval/eval_step_N/metrics.json`."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import orjson


def take_evaluations(connection: sqlite3.Connection, run: int, directory: Path) -> None:
    """Write what is published of a run; one that was made anew replaces its figures, one that is gone goes."""
    kept: set[tuple[int, str]] = set()
    for path in (directory / "eval").glob("eval_step_*/metrics.json"):
        match = re.fullmatch(r"eval_step_(\d+)", path.parent.name)
        try:
            content = orjson.loads(path.read_bytes())
            figures = {name: orjson.dumps(each).decode() for name, each in content["datasets"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # it is being written, or is none
        if match is not None:
            rows = [(run, int(match[1]), name, text) for name, text in figures.items()]
            connection.executemany("INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?)", rows)
            kept |= {(int(match[1]), name) for name in figures}
    known = connection.execute("SELECT step, dataset FROM evaluations WHERE run = ?", (run,)).fetchall()
    for step, dataset in set(map(tuple, known)) - kept:
        query = "DELETE FROM evaluations WHERE run = ? AND step = ? AND dataset = ?"
        connection.execute(query, (run, step, dataset))
