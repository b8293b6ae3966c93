"""Tables of a run's files: checkpoints with what holds them, and samples."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import orjson
from nicegui import ui

from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.manifest import BEST, EXPORT, KEEP, has_export, list_checkpoints, read_complete
from verl_ext.files import GIB
from verl_ext.metrics.jsonl import SAMPLES_FILE
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.page.evaluation import best_step
from verl_ext.monitor.page.log import moment
from verl_ext.monitor.view import RunView

LAST_SAMPLES = 64
SAMPLES_BYTES = 1 << 20
"""Read from the end of a file of samples."""


class CheckpointsPanel:
    """Checkpoints on the disk.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        names = ("Step", "Size", "Saved", "State", "Held by")
        columns = [{"name": name, "label": context.say(name), "field": name, "align": "left"} for name in names]
        self._table = (
            ui.table(columns=columns, rows=[], row_key="Step").classes("w-full").props('data-testid="checkpoints"')
        )

    def show(self, view: RunView) -> None:
        """Look at the disk."""
        self._table.rows = [checkpoint_row(path, best_step(view)) for path in list_checkpoints(view.directory)]


def checkpoint_row(path: Path, best: int | None) -> dict[str, Any]:
    """One checkpoint."""
    try:
        manifest = read_complete(path)
    except ValueError as error:
        return {"Step": path.name, "Size": "", "Saved": "", "State": str(error), "Held by": ""}
    held = [KEEP] if (path / KEEP).exists() else []
    held += [BEST] if manifest.step == best else []
    held += [str(each) for each in lease_holders(path)]
    return {
        "Step": path.name,
        "Size": f"{manifest.num_bytes / GIB:.3f} GiB",
        "Saved": moment(manifest.time) if manifest.time else "",
        "State": "complete" + (f", {EXPORT}/" if has_export(path) else ""),
        "Held by": ", ".join(held),
    }


class SamplesPanel:
    """The last rows of `samples.jsonl`.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context = context
        self._table = ui.table(columns=[], rows=[], pagination=16).classes("w-full").props('data-testid="samples"')
        self._table.props("wrap-cells dense")

    def show(self, view: RunView) -> None:
        """Read the end of the file."""
        rows = last_samples(view.directory / SAMPLES_FILE)
        names = dict.fromkeys(name for row in rows for name in row)
        self._table.columns = [{"name": name, "label": name, "field": name, "align": "left"} for name in names]
        self._table.rows = rows


def last_samples(path: Path) -> list[dict[str, Any]]:
    """Samples, the newest first; empty where there are none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - SAMPLES_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    rows: deque[dict[str, Any]] = deque(maxlen=LAST_SAMPLES)
    for line in lines:
        try:
            row = orjson.loads(line)
        except ValueError:  # the first may be cut, and the last is being written
            continue
        if isinstance(row, dict):
            rows.append({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
    return list(reversed(rows))
