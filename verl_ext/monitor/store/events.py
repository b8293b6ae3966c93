"""What happened in a run, as lines for people: from its record, its metrics and what the health rules said."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from verl_ext.metrics.jsonl import EVENTS_FILE
from verl_ext.metrics.run_record import seconds_of
from verl_ext.monitor.store.columns import Row
from verl_ext.monitor.store.lines import read_new

Event = tuple[float, int | None, int | None, str, str]
"""Time, attempt, step, kind, text; `page/log.py` has a colour for each kind."""
LOGGED_EVERY = 10
"""Steps between two lines on training, as on the console."""


def events_of_row(row: Row) -> Iterator[Event]:
    """Lines on one row of metrics."""
    attempt, step, time, metrics = row
    if "val/loss" in metrics:
        yield time, attempt, step, "evaluation", f"val/loss {_figure(metrics['val/loss'])}"
    elif "eval/reward_total_mean" in metrics:
        yield time, attempt, step, "evaluation", f"eval reward {_figure(metrics['eval/reward_total_mean'])}"
    if "time/train/save_s" in metrics:
        yield time, attempt, step, "checkpoint", f"checkpoint saved in {_figure(metrics['time/train/save_s'])} s"
    if "train/loss" in metrics and step % LOGGED_EVERY == 0:
        parts = [f"loss {_figure(metrics['train/loss'])}"]
        parts += [f"{word} {_figure(metrics[name])}" for word, name in _SHOWN.items() if name in metrics]
        if isinstance(rate := metrics.get("train/lr(1e-3)"), (int, float)):
            parts.append(f"learning rate {_figure(rate / 1e3)}")
        yield time, attempt, step, "step", ", ".join(parts)


_SHOWN = {
    "reward": "train/reward_total_mean",
    "accuracy": "train/accuracy_mean",
    "grad norm": "train/grad_norm",
}


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


def take_attempts(connection: sqlite3.Connection, run: int, attempts: Sequence[Mapping[str, Any]]) -> None:
    """Write a run's attempts, and the lines on how each began and ended, each once."""
    query = "SELECT attempt, kind FROM events WHERE run = ? AND kind IN ('start', 'end', 'failure')"
    told = set(map(tuple, connection.execute(query, (run,))))
    connection.execute("DELETE FROM attempts WHERE run = ?", (run,))
    names = ("start", "end", "first_step", "last_step", "world_size", "exit_reason", "host")
    for each in attempts:
        values = [run, each["attempt"], *(each.get(name) for name in names)]
        connection.execute("INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        for event in _of_attempt(each):
            if (event[1], event[3]) not in told:
                connection.execute("INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?)", (run, *event))


def _of_attempt(attempt: Mapping[str, Any]) -> Iterator[Event]:
    number, reason = attempt["attempt"], attempt.get("exit_reason") or ""
    if (begun := seconds_of(attempt.get("start"))) is not None:
        where = f"on {attempt.get('host')}, {attempt.get('world_size')} ranks" if attempt.get("host") else ""
        first = attempt.get("first_step")
        yield begun, number, first, "start", f"attempt {number} began at step {first or 0} {where}".rstrip()
    if (ended := seconds_of(attempt.get("end"))) is not None:
        well = reason.startswith(("all steps", "stopped"))
        yield ended, number, attempt.get("last_step"), "end" if well else "failure", f"attempt {number} ended: {reason}"


def take_events(connection: sqlite3.Connection, row: sqlite3.Row, directory: Path) -> None:
    """Read on in `events.jsonl`, what the health rules said; `row` is the run's."""
    run, new = row["id"], read_new(directory / EVENTS_FILE, row["events_offset"], row["events_head"])
    if new is None:
        return
    if new.is_other:
        said = "DELETE FROM events WHERE run = ? AND kind IN ('ok', 'notice', 'warning', 'alarm')"
        connection.execute(said, (run,))
    for line in new.lines:
        try:
            told = orjson.loads(line)
            text = f"{told['name']}: {told['text']}"
            event = (float(told["time"]), told.get("attempt"), told.get("step"), str(told["level"]), text)
        except (ValueError, TypeError, KeyError, AttributeError):
            continue  # a line that a crash left torn
        connection.execute("INSERT INTO events VALUES (NULL, ?, ?, ?, ?, ?, ?)", (run, *event))
    offsets = "UPDATE runs SET events_offset = ?, events_head = ? WHERE id = ?"
    connection.execute(offsets, (new.offset, new.head, run))
