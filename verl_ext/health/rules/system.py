"""Rules on time, throughput and the disk."""

from __future__ import annotations

import numpy as np

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule
from verl_ext.health.trends import trend_of

SYSTEM: list[Rule] = []
STEP, DATA, DISK = "time/train/step_s", "time/train/data_s", "system/disk_free_gib"
RATES = (
    "throughput/train/tokens_per_s",
    "throughput/train/valid_tokens_per_s",
    "throughput/train/configs_per_s",
)
WARM_UP = 3
"""First parts of a run that are not usual."""
LASTING_S = 60.0
"""Steps that are slow for a shorter time say more of what else the machine did than of the run."""
MEASURED_RATES, MEASURED_PARTS, MEASURED_S = 200, 4, 300.0
"""Steps over which throughput is judged, equal parts of them that must all be unstable, and the least they last."""
SAVES = 5
"""Saves over which the disk is watched."""


@rule(STEP, advice="look at the parts of the step (time/train/...), and at what else runs there", into=SYSTEM)
def step_time_high(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """Steps of the last minute, ten at least, take several times as long as was usual."""
    series = history.series(STEP)
    recent, usual = series.recent(), series.buckets[1:]
    if len(usual) < WARM_UP:
        return None
    num_lasting = int(np.searchsorted(np.cumsum(recent[::-1]), LASTING_S)) + 1
    now, before = float(np.median(recent[-max(num_lasting, limits.window // 2) :])), float(np.median(usual))
    told = f"a step takes {now:.3g} s, {before:.3g} s was usual"
    return warning(told) if now > limits.step_time_factor * before else ok(told)


@rule(STEP, *RATES, advice="something grows with the run: memory, logs or a data cache", into=SYSTEM)
def step_time_rising(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """Steps, or in the stage grpo the time of a token, have become slower and slower over the whole run."""
    per_token = facts.stage == "grpo"  # completions may grow, and steps with them
    buckets = history.series(RATES[1] if per_token else STEP).buckets[1:]
    if len(buckets) < 3 * WARM_UP:
        return None
    buckets = 1 / buckets if per_token else buckets
    trend, usual = trend_of(buckets), float(np.median(buckets))
    told = f"the time of a {'token' if per_token else 'step'} changed by {trend.change / usual:+.0%} over the run"
    half = len(buckets) // 2
    # not a jump: each half has its own rise
    steady = min(trend_of(buckets[:half]).change, trend_of(buckets[half:]).change) > trend.change / 5
    return warning(told) if trend.z > 6 and trend.change > limits.step_time_growth * usual and steady else ok(told)


@rule(STEP, DATA, advice="raise data.num_workers, or look at the disk that the data are on", into=SYSTEM)
def waiting_for_data(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """Much of a step is spent on waiting for its batch."""
    steps, waits = (history.series(name).recent(limits.window) for name in (STEP, DATA))
    if min(len(steps), len(waits)) < limits.window:
        return None
    share = float(np.median(waits) / np.median(steps))
    told = f"{share:.0%} of a step is waiting for data"
    return warning(told) if share > limits.data_share_max else ok(told)


@rule(
    STEP,
    *RATES,
    advice="look for other jobs on the machine, slow disks, or batches of very different sizes",
    into=SYSTEM,
)
def throughput_unstable(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The throughput jumps from step to step throughout the last 200 steps, which took five minutes or more."""
    name = next((each for each in RATES if history.series(each).num_points), None)
    recent = history.series(name).recent(MEASURED_RATES) if name else np.empty(0)
    if len(recent) < MEASURED_RATES or history.series(STEP).recent(MEASURED_RATES).sum() < MEASURED_S:
        return None
    low, middle, high = np.percentile(recent.reshape(MEASURED_PARTS, -1), (16, 50, 84), axis=1)
    spread = float(((high - low) / 2 / middle).min())
    told = f"throughput spreads by at least {spread:.0%} around {np.median(recent):.4g}"
    return warning(told) if spread > limits.throughput_spread_max else ok(told)


@rule(DISK, advice="make room, or set a smaller trainer.max_ckpt_to_keep", into=SYSTEM)
def disk_filling(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The disk has room for few further saves, at the rate at which the last ones filled it."""
    free = history.series(DISK).recent(SAVES + 1)
    if len(free) < 3:
        return None
    taken = float(free[0] - free[-1]) / (len(free) - 1)
    told = f"{free[-1]:.1f} GiB are free"
    if taken <= 0 or free[-1] > limits.disk_saves_left * taken:
        return ok(told)
    left = f"{told}, and each save takes {taken:.2g} GiB more"
    return alarm(left) if free[-1] < 2 * taken else notice(left) if taken < 1e-3 else warning(left)
