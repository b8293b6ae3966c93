"""Rules on rewards, advantages and what they are made of."""

from __future__ import annotations

import numpy as np

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import REWARDED, Facts
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule
from verl_ext.health.series import FIRST_BUCKET, Array
from verl_ext.health.trends import falls, noise_of, rises, trend_of

REWARD: list[Rule] = []
TOTAL, ADV_MEAN, ADV_STD = "train/reward_total_mean", "train/adv_mean", "train/adv_std"
FAILURES = "train/reward_failures"
CORRECT = ("train/reward_correct_mean", "train/accuracy_mean", "train/code_tests_mean")
FORMAT = ("train/reward_format_mean", "train/tag_count_reward_mean")
LONG = 100
"""Steps that take the place of epochs where a run has few of them."""
COMPARED = 50
"""Least steps over which format and correctness are compared."""
NOISES = 4.0


def _scatter(values: Array) -> float:
    """Standard deviation of what is no trend, not robust: of rare rewards most steps have none."""
    return max(noise_of(values), float(np.std(np.diff(values))) / float(np.sqrt(2)))


@rule(TOTAL, advice="stop, go on from an earlier checkpoint with a smaller optim.lr", into=REWARD, stages=REWARDED)
def reward_falling(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The mean reward of an epoch has fallen over many epochs, or the recent one is far below the run's best."""
    means, series = history.epochs(TOTAL)[-limits.trend_epochs - 1 :], history.series(TOTAL)
    if len(means) > limits.trend_epochs and falls(means):
        return alarm(f"the reward went from {means[0]:.4g} to {means[-1]:.4g} over {limits.trend_epochs} epochs")
    recent, buckets = series.recent(limits.window), series.buckets
    if len(recent) < limits.window or len(buckets) < 3:
        return None
    now, best, start = float(recent.mean()), float(buckets.max()), float(buckets[0])
    told = f"the recent reward is {now:.4g}, the best was {best:.4g}"
    fallen, error = best - now, _scatter(series.recent()) / np.sqrt(FIRST_BUCKET)
    # the best of many parts is above their mean by some errors of a part, also where nothing is lost
    lost = fallen > 1.5 * NOISES * error and fallen > 0.3 * max(best - start, abs(best) / 2)
    return warning(told) if lost else ok(told)


@rule(TOTAL, advice="look at the parts of the reward: one of them outweighs the rest", into=REWARD, stages=REWARDED)
def reward_negative(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The reward has been negative all along, and does not rise."""
    means, series = history.epochs(TOTAL)[-limits.trend_epochs :], history.series(TOTAL)
    values = means if len(means) == limits.trend_epochs else series.recent(LONG)
    if len(values) < limits.trend_epochs or (values is not means and len(values) < LONG):
        return None
    told = f"the reward was between {values.min():.3g} and {values.max():.3g}"
    if values.max() >= 0:
        return ok(told)
    better = rises(values) if values is means else trend_of(values).z > NOISES
    return notice(f"{told}, and rises") if better else warning(told)


@rule(
    *CORRECT,
    advice="look at samples.jsonl: are answers judged against the right references",
    into=REWARD,
    stages=REWARDED,
)
def accuracy_zero(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """No answer has been right over many epochs, or many steps where a run has few epochs."""
    name = next((each for each in CORRECT if history.series(each).num_points), None)
    if name is None:
        return None
    means, recent = history.epochs(name)[-limits.stuck_epochs :], history.series(name).recent(LONG)
    if len(means) == limits.stuck_epochs and means.max() == 0:
        return alarm(f"{name} was 0 for {limits.stuck_epochs} epochs")
    if len(recent) < LONG:
        return None
    return warning(f"{name} was 0 for {LONG} steps") if recent.max() == 0 else ok(f"{name} is {recent[-1]:.3g}")


@rule(
    FAILURES,
    advice="fix the reward function: the output of the run has the traceback of its first failure",
    into=REWARD,
    stages={"grpo"},
)
def reward_failures(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """Reward functions fail on a share of the recent samples; an alarm where they fail on many."""
    recent = history.series(FAILURES).recent(limits.window)
    if facts.samples_per_step is None or len(recent) < 3:
        return None
    mean, samples = float(recent.mean()), facts.samples_per_step
    message = f"reward functions failed {mean:.3g} times in a step of {samples} samples"
    if mean > limits.reward_failure_share_alarm * samples:
        return alarm(message)
    return warning(message) if mean > limits.reward_failure_share * samples else ok(message)


@rule(
    ADV_MEAN,
    ADV_STD,
    advice="groups are mixed up: advantages of a group sum to 0, so check sample_id and rollout.n",
    into=REWARD,
    stages=REWARDED,
)
def advantages_not_centred(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The advantages' mean is not 0 beside their spread."""
    means, spreads = (history.series(name).recent(limits.window) for name in (ADV_MEAN, ADV_STD))
    if min(len(means), len(spreads)) < limits.window:
        return None
    mean, spread = float(np.median(np.abs(means))), float(np.median(spreads))
    told = f"advantages have a mean of {mean:.3g} and a spread of {spread:.3g}"
    return alarm(told) if mean > limits.adv_mean_max * max(spread, 1e-6) else ok(told)


@rule(
    ADV_STD,
    advice="rewards do not differ within groups: raise rollout.n or the temperature, or take other prompts",
    into=REWARD,
    stages=REWARDED,
)
def advantages_flat(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """No recent step had advantages to learn from."""
    recent = history.series(ADV_STD).recent(limits.window)
    if len(recent) < limits.window:
        return None
    told = f"advantages spread by {np.median(recent):.3g}"
    return alarm(told) if recent.max() < 1e-6 else ok(told)


@rule(
    *FORMAT,
    *CORRECT,
    advice="lower the format's weight in reward.functions, or check the judge on samples.jsonl",
    into=REWARD,
    stages={"grpo"},
)
def format_without_correctness(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The reward for format rises while that for correctness does not."""
    form = next((each for each in FORMAT if history.series(each).num_points), None)
    right = next((each for each in CORRECT if history.series(each).num_points), None)
    if form is None or right is None or history.series(form).num_points < COMPARED:
        return None
    learnt, solved = (trend_of(history.series(each).recent()) for each in (form, right))
    told = f"{form} changed by {learnt.change:+.3g}, {right} by {solved.change:+.3g}"
    gained = learnt.z > NOISES and learnt.change > 0.05
    return warning(told) if gained and solved.z < 3 else ok(told)
