"""Seconds from the command to the first training step, by part: `run_sft.sh` itself, several times.

    python -m benchmarks.start [--ranks 2] [--repeats 5] [--output FILE.json] [key=value ...]

The quickstart, its data prepared, trains one step in a fresh run directory each time. The first time is not counted: it
warms the files that are read. Every part is the product's own `time/start/*_s`, rank 0's clock from the command to the
end of the first step. The shell script becomes the launcher and so counts in its part. `outside_s` is the same whole by
this benchmark's clock. The parts of a start add up to its total; medians of parts need not. The exit status is 1 where
the median of `total_s` is above `--limit`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.about import about
from verl_ext.errors import UserError, exit_on_user_error
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parents[1]
PREFIX = "time/start/"
Parts = dict[str, float]


def start_once(ranks: int, overrides: list[str]) -> Parts:
    """Seconds of each part of one start, in the order in which they pass.

    Raises:
        UserError: the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_start_") as directory:
        words = [str(ranks), f"trainer.default_local_dir={directory}/run", "trainer.total_training_steps=1", *overrides]
        environment = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "VERL_EXT_PYTHON": sys.executable, **os.environ}
        begun = time.time()
        done = subprocess.run(["bash", ROOT / "run_sft.sh", *words], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise UserError(f"run_sft.sh exited with {done.returncode}: {done.stderr[-500:]}")
        return parts_of(read_metrics(Path(directory, "run", METRICS_FILE)), begun)


def parts_of(rows: list[dict[str, Any]], begun: float) -> Parts:
    """The parts that a run recorded.

    Args:
        rows: of its metrics.
        begun: when the command was typed, in seconds since 1970.
    """
    stepped = next(row["time"] for row in rows if "train/loss" in row)
    recorded = next(row for row in rows if f"{PREFIX}total_s" in row)
    parts = {name.removeprefix(PREFIX): value for name, value in recorded.items() if name.startswith(PREFIX)}
    return {**parts, "outside_s": stepped - begun}


def summary_of(starts: list[Parts]) -> dict[str, dict[str, float]]:
    """Least, median and greatest of each part."""
    parts = {name: [start[name] for start in starts] for name in starts[0]}
    return {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for name, values in parts.items()
    }


def table_of(parts: dict[str, dict[str, float]]) -> str:
    """The figures as text."""
    lines = [f"{name:<18}{each['min']:8.2f}{each['median']:8.2f}{each['max']:8.2f}" for name, each in parts.items()]
    return "\n".join([f"{'seconds':<18}{'min':>8}{'median':>8}{'max':>8}", *lines])


@exit_on_user_error()
def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for run_sft.sh")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5, help="starts that count (default 5)")
    parser.add_argument("--limit", type=float, default=25.0, metavar="S", help="most seconds wanted (default 25)")
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        raise UserError(f"--repeats is {arguments.repeats}; at least one start is needed")
    turns = tqdm(range(arguments.repeats + 1), desc="starts", unit="start", disable=None)
    starts = [start_once(arguments.ranks, arguments.overrides) for _ in turns][1:]
    parts = summary_of(starts)
    print(table_of(parts))
    if arguments.output is not None:
        job = {"ranks": arguments.ranks, "overrides": arguments.overrides, "limit_s": arguments.limit}
        arguments.output.write_text(
            json.dumps({**about("torch", "transformers"), **job, "parts": parts, "starts": starts}, indent=1) + "\n"
        )
    return int(parts["total_s"]["median"] > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
