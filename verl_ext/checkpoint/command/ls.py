"""`ls`: what checkpoints a run has, and what rotation would keep."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from verl_ext.checkpoint.command.run_directory import add_run_command, require_run_dir
from verl_ext.checkpoint.command.settings import read_retention
from verl_ext.checkpoint.command.survey import Entry, survey
from verl_ext.checkpoint.retention import metric_of
from verl_ext.cli import Commands
from verl_ext.console import print_line, text_table
from verl_ext.files import format_bytes

TEXT = (
    "List the checkpoints of a run. Shows for each, the newest first, its size, the number of ranks that wrote it, "
    "whether it is complete, its metrics, and why rotation by the run's config.yaml would keep it or not."
)


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_run_command(commands, "ls", TEXT, run, more="")
    parser.add_argument("--json", action="store_true", help="print a JSON list for scripts")


def run(arguments: argparse.Namespace) -> int:
    """Print the table or the list."""
    run_dir = require_run_dir(arguments.run_dir)
    retention = read_retention(run_dir)
    entries = survey(run_dir, retention)
    if arguments.json:
        print_line(json.dumps([_as_json(entry) for entry in entries], indent=1))
    else:
        print_line(_as_table(entries, dict.fromkeys((retention.best_metric, "train/loss"))))
    return 0


def _as_json(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "path": str(entry.path),
        "step": entry.step,
        "bytes": entry.num_bytes,
        "world_size": manifest and manifest.world_size,
        "time": manifest and manifest.time,
        "complete": manifest is not None,
        "state": entry.state,
        "written_by_verl": entry.is_stock,
        "metrics": manifest.metrics if manifest else {},
        "dropped": manifest.dropped if manifest else [],
        "kept_because": entry.kept_because,
        "goes_next": entry.goes_next,
        "loses_optimizer": entry.loses_optimizer,
    }


def _as_table(entries: list[Entry], names: dict[str, None]) -> str:
    values = {name: [_metric(entry, name) for entry in entries] for name in names}
    shown = {name: column for name, column in values.items() if any(cell != "-" for cell in column)}
    header = ["step", "size", "ranks", "saved at", "state", *shown, "kept because"]
    rows = [
        [
            str(entry.step),
            format_bytes(entry.num_bytes),
            str(entry.manifest.world_size) if entry.manifest else "-",
            local_time(entry.manifest.time if entry.manifest else None),
            entry.state,
            *(column[number] for column in shown.values()),
            entry.fate,
        ]
        for number, entry in enumerate(entries)
    ]
    return text_table([header, *rows])


def _metric(entry: Entry, name: str) -> str:
    value = metric_of(entry.manifest, name) if entry.manifest else None
    return "-" if value is None else f"{value:.4g}"


def local_time(seconds: float | None) -> str:
    """Seconds since 1970 as date and time of this machine's zone; `-` for None."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"
