"""Seconds from the command to the first training step, by part: starts `run_sft.sh` several times.

Each start trains one step of the quickstart in a new run directory, with prepared data. The first start does not count,
because it loads files into the page cache. The parts are the run's own `time/start/*_s` metrics: rank 0 measures them
from the command to the end of the first step. The shell script becomes the launcher, so its time counts in that part.
`outside_s` is the total that this benchmark measures. The parts of a start add up to its total; medians need not.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import bench_parser, columns, in_rounds, run, write_results
from verl_ext.cli import FAILURES, FloatArg, IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

PREFIX = "time/start/"
StartParts = dict[str, float]
EXIT_CODES = {"0": "the median of `total_s` is at most `--limit`", "1": "it exceeds `--limit`", **FAILURES}


def start_once(ranks: int, overrides: list[str]) -> StartParts:
    """Start once; returns the seconds of each part, in order.

    Raises:
        UserError: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark_start_") as directory:
        words = [str(ranks), f"trainer.default_local_dir={directory}/run", "trainer.total_training_steps=1", *overrides]
        begun = time.time()
        run(["bash", "run_sft.sh", *words], {"VERL_EXT_PYTHON": os.environ.get("VERL_EXT_PYTHON", sys.executable)})
        return parts_of(read_metrics(Path(directory, "run", METRICS_FILE)), begun)


def parts_of(rows: list[dict[str, Any]], begun: float) -> StartParts:
    """The parts that a run recorded.

    Args:
        rows: rows of its metrics.
        begun: when the command started, in seconds since 1970.
    """
    stepped = next(row["time"] for row in rows if "train/loss" in row)
    recorded = next(row for row in rows if f"{PREFIX}total_s" in row)
    parts = {name.removeprefix(PREFIX): value for name, value in recorded.items() if name.startswith(PREFIX)}
    return {**parts, "outside_s": stepped - begun}


def summary_of(starts: list[StartParts]) -> dict[str, dict[str, float]]:
    """Minimum, median and maximum of each part."""
    return {
        name: {"min": min(values), "median": statistics.median(values), "max": max(values)}
        for name, values in columns(starts).items()
    }


def table_of(parts: dict[str, dict[str, float]]) -> str:
    """The results as text."""
    lines = [f"{name:<18}{each['min']:8.2f}{each['median']:8.2f}{each['max']:8.2f}" for name, each in parts.items()]
    return "\n".join([f"{'seconds':<18}{'min':>8}{'median':>8}{'max':>8}", *lines])


@clean_exit()
def main() -> int:
    """Measure, print and write the results."""
    parser = bench_parser("start", __doc__, "", "--repeats 3 --output FILE.json", exit_codes=EXIT_CODES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides for run_sft.sh")
    parser.add_argument("--ranks", type=IntArg(), default=2, help="ranks of each start")
    parser.add_argument("--repeats", type=IntArg(), default=5, help="measured starts")
    parser.add_argument("--limit", type=FloatArg(), default=25.0, metavar="S", help="maximum median of `total_s`")
    arguments = parser.parse_args()
    sides = {"starts": partial(start_once, arguments.ranks, arguments.overrides)}
    starts = in_rounds(sides, arguments.repeats, "starting", warm_up=1)["starts"]
    parts = summary_of(starts)
    print_line(table_of(parts))
    job = {"ranks": arguments.ranks, "overrides": arguments.overrides, "limit_s": arguments.limit}
    write_results({**job, "parts": parts, "starts": starts}, arguments.output)
    return int(parts["total_s"]["median"] > arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
