"""What the health rules cost a step: the rows of a real run through the rules, beside the time its steps took.

    python -m benchmarks.health RUN_DIR [RUN_DIR ...] [--every 10] [--output FILE.json]

Each run is replayed as the loop does it, row by row on one core, and checked as often. `share` is what the rules took
over what the run's steps took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from benchmarks.about import about
from verl_ext.errors import exit_on_user_error
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
        watch.note(row["step"], row)
    return time.perf_counter() - begun


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--every", type=int, default=10, help="steps between two checks")
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    with exit_on_user_error():
        found = [measure(run_dir, arguments.every) for run_dir in arguments.run_dirs]
    for each in found:
        print(
            f"{each['stage']:8} {each['steps']} steps of {each['step_ms']:.0f} ms, rules "
            f"{each['health_us_per_step']:.0f} us: {each['share']:.3%}"
        )
    if arguments.output is not None:
        content = {**about(), "every": arguments.every, "runs": found}
        arguments.output.write_text(json.dumps(content, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
