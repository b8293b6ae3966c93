"""A run's history from its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_ext.health.history import EPOCH, History
from verl_ext.health.rules import WATCHED
from verl_ext.metrics.jsonl import METRICS_FILE, iter_metrics


def rows_in_force(rows: Iterator[dict[str, Any]], attempts: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows on the way to the last step, those left out that a later attempt did again.

    Args:
        rows: of `metrics.jsonl`.
        attempts: of `run.json`.
    """
    begun = {each["attempt"]: each.get("first_step") for each in attempts}
    for row in rows:
        later = (first for number, first in begun.items() if number > row["attempt"] and first is not None)
        if row["step"] <= min(later, default=row["step"]):
            yield row


def replay(
    run_dir: Path,
    attempts: Sequence[Mapping[str, Any]],
    until: int | None = None,
    names: frozenset[str] = WATCHED,
) -> tuple[History, int | None]:
    """What the rules see of a run.

    Args:
        run_dir: with `metrics.jsonl`; there may be none yet.
        attempts: of `run.json`.
        until: last step that counts; None for all.
        names: of the metrics that rules watch.

    Returns:
        The history, and the steps of an epoch where the run has told.

    Raises:
        UserError: the file cannot be read.
    """
    history, steps_per_epoch, needed = History(names), None, names | {EPOCH}
    path = run_dir / METRICS_FILE
    last = max((each["attempt"] for each in attempts), default=None)
    for row in rows_in_force(iter_metrics(path), attempts) if path.is_file() else ():
        if until is not None and row["step"] > until:
            if row["attempt"] == last:  # nothing that counts comes behind it
                break
            continue
        metrics = {name: float(row[name]) for name in row.keys() & needed}
        if metrics.get(EPOCH):
            steps_per_epoch = round(row["step"] / metrics[EPOCH])
        history.add(row["step"], metrics, row["time"])
    return history, steps_per_epoch
