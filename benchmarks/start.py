"""Seconds from the command to the first training step, by part: `run_sft.sh` itself, several times.

The quickstart, its data prepared, trains one step in a fresh run directory each time. The first time is not counted: it
warms the files that are read. Every part is the product's own `time/start/*_s`, rank 0's clock from the command to the
end of the first step. The shell script becomes the launcher and so counts in its part. `outside_s` is the same whole by
this benchmark's clock. The parts of a start add up to its total; medians of parts need not.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.running import run
from verl_ext.cli import FAILURES, FloatArg, IntArg, clean_exit
from verl_ext.console import print_line, progress_bar
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

PREFIX = "time/start/"
Parts = dict[str, float]
EXIT_CODES = {"0": "the median of `total_s` is at most `--limit`", "1": "it is more", **FAILURES}


def start_once(ranks: int, overrides: list[str]) -> Parts:
    """Seconds of each part of one start, in the order in which they pass.

    Raises:
        UserError: the command fails.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_start_") as directory:
        words = [str(ranks), f"trainer.default_local_dir={directory}/run", "trainer.total_training_steps=1", *overrides]
        begun = time.time()
        run(["bash", "run_sft.sh", *words], VERL_EXT_PYTHON=os.environ.get("VERL_EXT_PYTHON", sys.executable))
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


@clean_exit()
def main() -> int:
    """Measure, print and write."""
    parser = bench_parser("start", __doc__, "", "--repeats 3 --output FILE.json", exit_codes=EXIT_CODES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe, for run_sft.sh")
    parser.add_argument("--ranks", type=IntArg(), default=2, help="of each start")
    parser.add_argument("--repeats", type=IntArg(), default=5, help="starts that count")
    parser.add_argument("--limit", type=FloatArg(), default=25.0, metavar="S", help="most seconds wanted")
    arguments = parser.parse_args()
    turns = progress_bar(range(arguments.repeats + 1), desc="starting", unit="starts")
    starts = [start_once(arguments.ranks, arguments.overrides) for _ in turns][1:]
    parts = summary_of(starts)
    print_line(table_of(parts))
    job = {"ranks": arguments.ranks, "overrides": arguments.overrides, "limit_s": arguments.limit}
    write_figures({**job, "parts": parts, "starts": starts}, arguments.output)
    return int(parts["total_s"]["median"] > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
