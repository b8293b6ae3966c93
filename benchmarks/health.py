"""What the health rules cost, and what they detect.

With run directories: replay each run row by row on one core, with the checks of the training loop. `share` is the time
of the rules divided by the time of the run's steps.

With `--detection N`: simulate N runs for each rule and each size of a change, in standard errors of the noise of the
epoch means, and report how often the rule complains at the end of the run. A change of 0 gives false alarms for rules
that look for a change, and detections for rules that look for the lack of one.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.harness import Results, bench_parser, write_results
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import RunContext
from verl_ext.health.history import MetricHistory, effective_rows
from verl_ext.health.rule import EVAL_REWARD, LOSS, REWARD, VAL_LOSS, HealthView, Level
from verl_ext.health.rules import RULES
from verl_ext.health.run_directory import RunDirectory
from verl_ext.health.trend import Array, line_change
from verl_ext.health.watch import HealthMonitor
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

ROUNDS = 5
"""Replays of each run, of which the median is reported."""
CHANGES = (0.0, 2.0, 4.0, 6.0, 8.0, 11.0)
"""Sizes of a simulated change, in its standard errors."""
STEPS_PER_EPOCH = 10
Rows = Iterator[tuple[int, dict[str, float]]]
Simulator = Callable[[float, np.random.Generator], Rows]
"""Simulates a run with a change of a given size."""


# Cost


def measure(run_dir: Path, every: int) -> Results:
    """Measure the time of the rules and of the steps.

    Raises:
        UserError: the directory is not a run directory.
    """
    run = RunDirectory.read(run_dir)
    rows = list(effective_rows(iter(read_metrics(run_dir / METRICS_FILE)), run.run["attempts"]))
    step_s = sum(row.get("time/train/step_s", 0.0) for row in rows)
    num_steps = sum(LOSS in row for row in rows)
    us_per_step = [1e6 * replay(run, rows, every) / num_steps for _ in range(ROUNDS)]
    median = statistics.median(us_per_step)
    return {
        "stage": run.stage,
        "steps": num_steps,
        "step_ms": 1e3 * step_s / num_steps,
        "health_us_per_step": median,
        "health_us_range": [min(us_per_step), max(us_per_step)],
        "share": median * num_steps / 1e6 / step_s,
    }


def replay(run: RunDirectory, rows: list[dict[str, float]], every: int) -> float:
    """Seconds of `HealthMonitor.check` over all rows."""
    monitor = HealthMonitor(HealthView(MetricHistory(), run.view.context, run.view.limits), every)
    start = time.perf_counter()
    for row in rows:
        monitor.check(int(row["step"]), row)
    return time.perf_counter() - start


# Detection


@dataclass(frozen=True)
class Simulation:
    """A rule and the simulated runs for it.

    Attributes:
        rule: name of the rule.
        stage: stage of the runs.
        change: description of the change in the runs.
        rows: creates the rows of a run, given the size of the change in standard errors.
        level: lowest level that counts as a complaint.
    """

    rule: str
    stage: str
    change: str
    rows: Simulator
    level: Level = Level.WARNING


def ramps(num_epochs: int, **slopes: tuple[float, float, float]) -> Simulator:
    """Runs whose epoch means follow a straight line.

    Args:
        num_epochs: number of epochs of each run.
        slopes: by metric below `train/`: value in the middle, noise of an epoch mean, and direction (1 or -1).
    """

    def rows(size: float, rng: np.random.Generator) -> Rows:
        num_steps = num_epochs * STEPS_PER_EPOCH
        line = size * math.sqrt(12 / num_epochs) * np.linspace(-0.5, 0.5, num_steps)
        curves = {
            f"train/{name}": middle
            + noise * (sign * line + math.sqrt(STEPS_PER_EPOCH) * rng.standard_normal(num_steps))
            for name, (middle, noise, sign) in slopes.items()
        }
        for place in range(num_steps):
            epoch = {"train/epoch": (place + 1) / STEPS_PER_EPOCH}
            yield place + 1, {**epoch, **{name: float(values[place]) for name, values in curves.items()}}

    return rows


def past_their_best(measured: str, trained: str, sign: int, noise: float) -> Simulator:
    """Runs with 16 validations that improve in the first half and get worse in the second one, while training improves.

    The size of the change is in standard deviations of a validation.

    Args:
        measured: validation metric.
        trained: training metric.
        sign: 1 if higher is better.
        noise: standard deviation of a validation.
    """

    def rows(size: float, rng: np.random.Generator) -> Rows:
        gains = np.concatenate([np.linspace(-0.4, 0, 8), -noise * size * np.linspace(0, 1, 9)[1:]])
        for place, gain in enumerate(gains + noise * rng.standard_normal(16)):
            for step in range(20 * place + 1, 20 * place + 21):
                yield step, {trained: 1 + sign * step / 640 + 0.02 * float(rng.standard_normal())}
            yield 20 * place + 20, {measured: 1 + sign * float(gain)}

    return rows


SIMULATIONS = (
    Simulation("loss_rising", "sft", "loss rises", ramps(11, loss=(1.0, 0.1, 1))),
    Simulation("reward_falling", "budget", "reward falls", ramps(11, reward_total_mean=(1.0, 0.02, -1))),
    Simulation("accuracy_falling", "budget", "accuracy falls", ramps(11, accuracy_mean=(0.4, 0.02, -1))),
    Simulation("violation_rising", "budget", "violations rise", ramps(11, budget_violation_mean=(0.3, 0.02, 1))),
    Simulation(
        "reward_not_rising", "budget", "reward rises", ramps(20, reward_total_mean=(0.5, 0.05, 1)), Level.NOTICE
    ),
    Simulation(
        "nothing_improves",
        "budget",
        "reward, accuracy and violations improve",
        ramps(
            20,
            reward_total_mean=(0.5, 0.05, 1),
            accuracy_mean=(0.4, 0.02, 1),
            budget_violation_mean=(0.3, 0.02, -1),
        ),
    ),
    Simulation("overfitting", "sft", "val/loss rises after its best", past_their_best(VAL_LOSS, LOSS, -1, 0.005)),
    Simulation(
        "eval_reward_falling",
        "grpo",
        "eval reward falls after its best",
        past_their_best(EVAL_REWARD, REWARD, 1, 0.03),
    ),
)


def detection(simulation: Simulation, size: float, num_runs: int) -> float:
    """Share of the simulated runs about which the rule complains."""
    [rule] = [rule for rule in RULES if rule.name == simulation.rule]
    complaints = 0
    for seed in range(num_runs):
        history = MetricHistory()
        for step, metrics in simulation.rows(size, np.random.default_rng([seed, int(size)])):
            history.add(step, metrics)
        found = rule.run(HealthView(history, RunContext(simulation.stage), HealthLimits()))
        complaints += found is not None and found.level >= simulation.level
    return complaints / num_runs


def share_of_steps(size: float, num_runs: int) -> float:
    """Like `detection`, for a simpler rule: 80% of the epoch means rise, by 4 standard errors in all."""
    complaints = 0
    for seed in range(num_runs):
        rows = ramps(11, loss=(0.0, 1.0, 1))(size, np.random.default_rng([seed, int(size)]))
        means = np.array([metrics[LOSS] for _, metrics in rows]).reshape(11, STEPS_PER_EPOCH).mean(1)
        complaints += bool((np.diff(means) > 0).mean() >= 0.8 and line_length(means) >= 4)
    return complaints / num_runs


def line_length(values: Array) -> float:
    """The change along the least-squares line, in its standard errors."""
    change, count = line_change(values), len(values)
    rest = values - np.linspace(0, change, count)
    noise = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    return change / (noise * math.sqrt(12 / count))


def detection_table(num_runs: int) -> list[dict[str, float | str]]:
    """A row of rates for each rule, by the size of the change."""
    rules: dict[tuple[str, str], Callable[[float, int], float]]
    rules = {(each.rule, each.change): partial(detection, each) for each in SIMULATIONS}
    rules["80 % of the steps", "loss rises"] = share_of_steps
    return [
        {"rule": rule, "change": change, **{f"{size:g}": detected(size, num_runs) for size in CHANGES}}
        for (rule, change), detected in rules.items()
    ]


@clean_exit()
def main() -> int:
    """Measure, print and write."""
    run_dir = "checkpoints/rlvr_coding_model/sft_quickstart"
    parser = bench_parser("health", __doc__, run_dir, f"{run_dir} --every 1 --output FILE.json", "--detection 1000")
    parser.add_argument("run_dirs", type=Path, nargs="*", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument("--every", type=IntArg(), default=10, help="steps between two checks")
    parser.add_argument("--detection", type=IntArg(), metavar="N", help="simulate N runs for each rule and change")
    arguments = parser.parse_args()
    if not arguments.run_dirs and arguments.detection is None:
        raise UserError("there is nothing to measure; specify a RUN_DIR or --detection")
    runs = [measure(run_dir, arguments.every) for run_dir in arguments.run_dirs]
    for each in runs:
        between = "{:.0f} to {:.0f}".format(*each["health_us_range"])
        print_line(
            f"{each['stage']:8} {each['steps']} steps of {each['step_ms']:.0f} ms, rules "
            f"{each['health_us_per_step']:.0f} ({between}) us: {each['share']:.3%}"
        )
    table = detection_table(arguments.detection) if arguments.detection is not None else []
    if table:
        sizes = [f"{size:g}" for size in CHANGES]
        print_line(f"{'rule':20} {'change':40}" + "".join(f"{size:>8}" for size in sizes))
    for row in table:
        print_line(f"{row['rule']:20} {row['change']:40}" + "".join(f"{float(row[size]):8.1%}" for size in sizes))
    write_results({"every": arguments.every, "runs": runs, "detection": table}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
