"""What the health rules cost a step: the rows of a real run through the rules, beside the time its steps took.

Each run is replayed as the loop does it, row by row on one core, and checked as often. `share` is what the rules took
over what the run's steps took.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.harness import bench_parser, write_results
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.health.history import History
from verl_ext.health.replay import rows_in_force
from verl_ext.health.rules import WATCHED
from verl_ext.health.run_files import RunFiles
from verl_ext.health.watch import HealthWatch
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

ROUNDS = 5
"""Replays of each run, of which the quickest counts: it is the one that nothing else disturbed."""


def measure(run_dir: Path, every: int) -> dict[str, float | int | str]:
    """Seconds of rules and of steps.

    Raises:
        UserError: the directory is no run's.
    """
    files = RunFiles.read(run_dir)
    rows = list(rows_in_force(iter(read_metrics(run_dir / METRICS_FILE)), files.run["attempts"]))
    step_s = sum(row.get("time/train/step_s", 0.0) for row in rows)
    seconds = min(replay(files, rows, every) for _ in range(ROUNDS))
    num_steps = sum("train/loss" in row for row in rows)
    return {
        "stage": files.facts.stage,
        "steps": num_steps,
        "step_ms": 1e3 * step_s / num_steps,
        "health_us_per_step": 1e6 * seconds / num_steps,
        "share": seconds / step_s,
    }


def replay(files: RunFiles, rows: list[dict[str, float]], every: int) -> float:
    """Seconds of `HealthWatch.note` over all rows."""
    watch = HealthWatch(History(WATCHED), files.facts, files.limits, every)
    begun = time.perf_counter()
    for row in rows:
        watch.note(int(row["step"]), row)
    return time.perf_counter() - begun


@clean_exit()
def main() -> int:
    """Measure, print and write."""
    run_dir = "checkpoints/rlvr_coding_model/sft_quickstart"
    parser = bench_parser("health", __doc__, run_dir, f"{run_dir} --every 1 --output FILE.json")
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument("--every", type=IntArg(), default=10, help="steps between two checks")
    arguments = parser.parse_args()
    found = [measure(run_dir, arguments.every) for run_dir in arguments.run_dirs]
    for each in found:
        print_line(
            f"{each['stage']:8} {each['steps']} steps of {each['step_ms']:.0f} ms, rules "
            f"{each['health_us_per_step']:.0f} us: {each['share']:.3%}"
        )
    write_results({"every": arguments.every, "runs": found}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
