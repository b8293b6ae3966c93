"""Run directories for the monitor, written as a trainer writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_ext.metrics.jsonl import MetricsFile


def write_record(run_dir: Path, status: str = "running", total_steps: int = 100, **attempts: int) -> None:
    """`run.json`; `attempts` are `aN=first step`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    listed: list[Mapping[str, Any]] = [
        {
            **{"attempt": int(name[1:]), "start": f"2026-01-01T00:0{name[1:]}:00+00:00", "first_step": first},
            **{"end": None, "last_step": None, "world_size": 2, "exit_reason": None, "host": "h", "pid": 1},
        }
        for name, first in (attempts or {"a1": 0}).items()
    ]
    run = {"status": status, "project": "p", "experiment": run_dir.name, "stage": "sft", "recipe": "r"}
    (run_dir / "run.json").write_text(json.dumps({**run, "total_steps": total_steps, "attempts": listed}))


def write_rows(run_dir: Path, attempt: int, steps: range, **metrics: float) -> None:
    """Rows of `metrics.jsonl`: `train/loss` is the step unless given, other names as given."""
    file = MetricsFile(run_dir / "metrics.jsonl", attempt)
    for step in steps:
        file.append(step, {"train/loss": float(step), **{f"train/{name}": value for name, value in metrics.items()}})
    file.close()
