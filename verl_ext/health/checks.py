"""Checks and statistics of single rules; `families` has checks that several rules share."""

from __future__ import annotations

import math

import numpy as np

from verl_ext.files import GIB, format_bytes
from verl_ext.health.context import REWARDED
from verl_ext.health.families import epoch_trend, trend_level
from verl_ext.health.history import SEGMENT_VALUES
from verl_ext.health.rule import (
    ACCURACY,
    ADV_STD,
    CORRECT,
    EVAL_REWARD_STD,
    GRAD_NORM,
    LOSS,
    NOISES,
    REWARD,
    STEP_TIME,
    VAL_LOSS,
    VIOLATION,
    CheckResult,
    HealthView,
    Level,
    alarm,
    notice,
    ok,
    warning,
)
from verl_ext.health.trend import Array, line_change, noise, trend

FLAT = 1e-6
"""Standard deviation of advantages below which all of them are 0."""
TOKEN_RATE = "throughput/train/valid_tokens_per_s"
MANY_STEPS = 100
"""Number of steps that replace epochs in short runs, and over which jitter is measured."""
MIN_FALL = 0.02
"""Smallest relevant fall of the loss, relative to its start."""
BEST_NOISES = 1.5 * NOISES
"""Standard errors by which the best of many segments must differ from their mean to be significant."""
EXPLODED = 1.5
"""Ratio to the initial loss above which the noise of a loss is taken relative to its level."""
NUM_INITIAL = 5
"""Number of steps whose mean is the initial loss."""
GUESSING_MARGIN = 1.1
"""Maximum initial loss of untrained weights relative to random guessing; their predictions are not quite uniform."""
SAMPLING_ERRORS = 2.0
"""Standard errors by which the means of two evaluations must differ to be significant (95% confidence)."""
VAL_RISES = 3
"""Consecutive rises of the validation loss for a warning."""
MIN_COMPARED = 50
"""Minimum number of steps for comparing the rewards for format and correctness."""
LAST_EPOCHS = 3
"""Number of epochs that represent the current state of a controller."""
NUM_LEARNING_RATES = 10
"""Number of steps whose learning rate is compared with the schedule."""
MIN_RATE = 1e-9
"""Tokens per second as which a rate of 0 counts."""
WARM_UP_SEGMENTS = 3
"""Number of segments at the start of a run whose step times are unusual."""
LASTING_S = 60.0
"""Minimum duration of slow steps; shorter ones usually come from other programs on the machine."""
NUM_RATES, RATE_PARTS, RATES_LAST_S = 200, 4, 300.0
"""Number of steps whose throughput is checked, parts that must all be unstable, and minimum total duration."""
NUM_SAVES = 5
"""Number of saves over which free disk space is tracked."""


# Loss


def loss_not_finite(view: HealthView) -> CheckResult | None:
    """An alarm after several steps in a row."""
    streak = view.series(LOSS).nonfinite_streak
    if not streak:
        return ok("the loss is finite") if view.series(LOSS).num_points else None
    message = f"the loss was not finite in the last {streak} step{'s' * (streak > 1)}"
    return alarm(message) if streak >= view.limits.nonfinite_steps else warning(message)


_loss_trend = epoch_trend(LOSS, 1, "the loss went from {:.4g} to {:.4g} over {} epochs", worst=Level.ALARM)


def loss_rising(view: HealthView) -> CheckResult | None:
    """A finding if the epoch means rise.

    The level of a policy loss has no meaning: it also rises when the policy becomes certain, or with an entropy bonus
    or a KL penalty, while the reward rises. It counts only if the reward falls.
    """
    found = _loss_trend(view)
    if found is None or view.context.stage not in REWARDED:
        return found
    rewards = view.epochs(REWARD, view.limits.trend_epochs + 1)
    is_worse = rewards is not None and trend(rewards).falls(view.limits.trend_p)
    return found if is_worse else ok(found.message)


def loss_diverging(view: HealthView) -> CheckResult | None:
    """An alarm if the loss is above its initial value, or more than twice its best."""
    series = view.series(LOSS)
    recent, means = view.recent(LOSS), series.segment_means
    if recent is None or len(means) < 2:
        return None
    later = recent[-len(recent) // 2 :]  # if the loss falls fast, the median of the whole window lags behind
    now, best = float(min(np.median(recent), np.median(later))), float(means.min())
    message = f"the recent loss is {now:.4g}, the best earlier mean was {best:.4g}"
    rise, start, spread = now - best, float(series.first.mean()), noise(series.recent())
    if now > EXPLODED * start > 0:  # the noise grows with the loss, and would hide that it explodes
        spread *= start / now
    if rise < view.limits.loss_min_change or rise < NOISES * spread or now < 1.3 * best:
        return ok(message)
    return alarm(message) if now > 2 * best or now > series.first[:NUM_INITIAL].mean() else warning(message)


def loss_not_falling(view: HealthView) -> CheckResult | None:
    """A warning if neither the trend of the loss, nor its best segment, nor the validations are clearly lower.

    A loss that diverges has its own rule, because its causes differ and its noise hides a fall before that.
    Batches of different texts vary more than a fine-tuned model's loss falls; a validation set stays the same.
    """
    series = view.series(LOSS)
    diverging = loss_diverging(view)
    if diverging is not None and diverging.level > Level.OK:
        return None
    if series.num_points < MANY_STEPS or series.first.mean() < view.limits.loss_min_change:
        return None
    best, start = float(series.segment_means[1:].min()), float(series.first[:SEGMENT_VALUES].mean())
    message = f"the loss started at {start:.4g}, and its best value was {best:.4g}"
    validations = view.series(VAL_LOSS)
    if validations.num_points > 1 and validations.last_value < (1 - view.limits.val_margin) * validations.first[0]:
        fall = f"val/loss fell from {validations.first[0]:.4g} to {validations.last_value:.4g}"
        return ok(f"{message}; {fall}")
    error, smallest = noise(series.recent()) / math.sqrt(SEGMENT_VALUES), MIN_FALL * start
    moved = trend(series.segment_means)  # significant even if each segment is within the noise of the others
    has_trend = moved.falls(view.limits.improvement_p) and moved.change < -smallest
    return ok(message) if has_trend or start - best > max(BEST_NOISES * error, smallest) else warning(message)


def loss_jitter(view: HealthView) -> CheckResult | None:
    """A warning if a cross-entropy fluctuates by a large fraction of its level, or a policy loss is extreme."""
    recent = view.recent(LOSS, MANY_STEPS)
    if recent is None:
        return None
    change = line_change(recent)
    spread = float(np.std(recent - np.linspace(-0.5, 0.5, len(recent)) * change))
    message = f"the loss jitters by {spread:.3g} around {recent.mean():.3g}, and changed by {change:+.3g}"
    if view.context.stage in REWARDED:
        highest = float(np.abs(recent).max())
        is_calm = highest <= view.limits.policy_loss_max
        return ok(message) if is_calm else warning(f"{message}; it reached {highest:.3g}")
    level = abs(float(recent.mean())) + view.limits.loss_min_change
    is_calm = spread <= view.limits.loss_jitter_max * level or trend(recent).falls(view.limits.trend_p_alarm)
    return ok(message) if is_calm else warning(message)


def initial_loss(view: HealthView) -> CheckResult | None:
    """Untrained weights may start at random guessing, trained ones may not."""
    first = view.series(LOSS).first[:NUM_INITIAL]
    if len(first) < NUM_INITIAL:
        return None
    message = f"the loss started at {first.mean():.3g}"
    if view.context.untrained_loss is not None:
        message += f"; the loss of random guessing is {view.context.untrained_loss:.3g}"
    return ok(message) if first.mean() <= highest_loss(view) else warning(message)


def highest_loss(view: HealthView) -> float:
    """The highest usual loss at the start of a run, which the end must not exceed either."""
    untrained, highest = view.context.untrained_loss, view.limits.initial_loss_max
    return highest if untrained is None else max(highest, GUESSING_MARGIN * untrained)


def final_loss(view: HealthView) -> CheckResult | None:
    """A low loss is fine if the validation loss is low, too; a loss that is too high for the start is never fine."""
    recent = view.recent(LOSS)
    if not view.is_near_end or recent is None:
        return None
    last, lowest = float(np.median(recent)), view.limits.final_loss_min
    message = f"the loss is {last:.3g} near the end of the run"
    if last > highest_loss(view):
        return CheckResult(Level.WARNING, message, "stop, lower optim.lr and resume from an earlier checkpoint")
    if last >= lowest:
        return ok(message)
    validated = view.series(VAL_LOSS).last_value
    generalizes = validated < max(2 * last, lowest)  # False for NaN, if nothing was validated
    return ok(f"{message}, and val/loss is {validated:.3g}") if generalizes else warning(message)


def final_val_loss(view: HealthView) -> tuple[float] | None:
    """The last validation loss near the end of the run; None for untrained weights, which have no usual range."""
    last = view.series(VAL_LOSS).last_value
    has_range = view.context.untrained_loss is None
    return (last,) if has_range and view.is_near_end and not math.isnan(last) else None


def val_loss_not_finite(view: HealthView) -> CheckResult | None:
    """Only the last validation counts."""
    series = view.series(VAL_LOSS)
    if series.num_nonfinite(1):
        return alarm("the last val/loss was not finite")
    return ok("val/loss is finite") if series.num_points else None


def val_loss_margin(view: HealthView, values: Array, best: float) -> float:
    """Smallest significant rise of a validation loss above the best."""
    return max(best * view.limits.val_margin, view.limits.val_min_change)


def eval_reward_margin(view: HealthView, values: Array, best: float) -> float:
    """Smallest significant fall of an evaluation reward below the best; infinite for two values of unknown error.

    A single value is part of a trend, which is significant even within the noise.
    """
    smallest = max(abs(best) * view.limits.eval_drop_max, view.limits.eval_min_change)
    if len(values) == 1:
        return smallest
    error = eval_reward_error(view)
    if error is None:
        return math.inf if len(values) < 3 else max(smallest, NOISES * noise(values))
    return max(smallest, NOISES * noise(values), SAMPLING_ERRORS * error)


def eval_reward_error(view: HealthView) -> float | None:
    """Standard error of the difference of two evaluation rewards; None if the number of prompts is not logged."""
    spreads = view.series(EVAL_REWARD_STD).recent()
    # the stage budget logs the number; in the stage grpo, it is the tokens of all completions by their mean length
    count = view.series("eval/num_configs").last_value
    if math.isnan(count):
        length = view.series("eval/seq_completion_len_mean").last_value
        count = view.series("eval/total_valid_token_count").last_value / length if length else math.nan
    if not len(spreads) or not count > 0:
        return None
    return math.sqrt(2 * float(np.mean(spreads**2)) / count)


def val_loss_rising(view: HealthView) -> CheckResult | None:
    """A warning after consecutive rises that are significant together."""
    values = np.array([value for _, value in view.comparable_points(VAL_LOSS)[-VAL_RISES - 1 :]])
    if len(values) <= VAL_RISES:
        return None
    message = f"the last values of val/loss are {', '.join(f'{value:.4g}' for value in values)}"
    first = float(values[0])
    has_risen = bool((np.diff(values) > 0).all()) and values[-1] > first + val_loss_margin(view, values, first)
    return warning(message) if has_risen else ok(message)


# Gradient and learning rate


def grad_norm_size(view: HealthView) -> tuple[float] | None:
    """The median of the recent gradient norms; None without advantages, which have their own rule.

    Steps whose prompts are all solved, or all unsolved, have no advantages and no gradient; they do not count.
    """
    spreads = dict(view.series(ADV_STD).points())
    norms = [norm for step, norm in view.series(GRAD_NORM).points() if spreads.get(step, math.inf) > FLAT]
    recent = norms[-view.limits.window :]
    return None if len(recent) < view.limits.window or has_flat_advantages(view) else (float(np.median(recent)),)


def share_of_large_norms(view: HealthView) -> tuple[float, int, float] | None:
    """Fraction of recent gradient norms that are too large or not finite, number of norms, and the limit."""
    window, bound, series = view.limits.window, view.limits.grad_norm_alarm, view.series(GRAD_NORM)
    num_lost = series.num_nonfinite(window)
    finite = series.recent(window - num_lost) if num_lost < window else np.empty(0)
    if len(finite) + num_lost < window:
        return None
    return (num_lost + int((finite > bound).sum())) / window, window, bound


def lr_schedule(view: HealthView) -> CheckResult | None:
    """A warning if the learning rate differs from the schedule at three steps."""
    latest, schedule = view.series("train/lr(1e-3)").points(NUM_LEARNING_RATES), view.context.schedule
    points = [(step, value) for step, value in latest if step > view.context.configured_at]
    if schedule is None or len(points) < 3:
        return None
    counter = view.series("train/skipped_steps")
    skipped = round(counter.last_value) if counter.num_points else 0
    allowed = view.limits.lr_tolerance * schedule.peak
    wrong = [
        (step, value)
        for step, value in points
        # a skipped step among these shifts the schedule by one, so any count up to the last one may apply
        if min(abs(value / 1e3 - schedule.at(step, each)) for each in range(skipped + 1)) > allowed
    ]
    if len(wrong) < 3:
        return ok("the learning rate follows its schedule")
    step, value = wrong[-1]
    return warning(
        f"the learning rate is {value / 1e3:.3g} at step {step}, but {schedule.at(step):.3g} in its schedule"
    )


# Rewards


def reward_falling(view: HealthView) -> CheckResult | None:
    """A finding if epoch means fall, or if the recent reward is far below the best of the run."""
    means = view.epochs(REWARD, view.limits.trend_epochs + 1)
    if means is not None and (level := trend_level(view, means, -1)):
        message = f"the reward went from {means[0]:.4g} to {means[-1]:.4g} over {view.limits.trend_epochs} epochs"
        return CheckResult(level, message)
    series = view.series(REWARD)
    recent = view.recent(REWARD)
    if recent is None or len(series.segment_means) < 3:
        return None
    # segments that overlap the recent steps would exceed their mean while the reward rises
    segments = series.segment_means[: -math.ceil(len(recent) / SEGMENT_VALUES)]
    if not len(segments):
        return None
    now, best, start = float(recent.mean()), float(segments.max()), float(segments[0])
    message = f"the recent reward is {now:.4g}, the best earlier mean was {best:.4g}"
    values = series.recent()
    # if rewards are rare, most steps are equal, so the robust noise is 0
    error = max(noise(values), float(np.std(np.diff(values))) / math.sqrt(2)) / math.sqrt(SEGMENT_VALUES)
    is_lost = best - now > max(BEST_NOISES * error, 0.3 * max(best - start, abs(best) / 2))
    return warning(message) if is_lost else ok(message)


def reward_negative(view: HealthView) -> CheckResult | None:
    """Only a notice if the reward rises."""
    means = view.epochs(REWARD, view.limits.trend_epochs)
    values = view.recent(REWARD, MANY_STEPS) if means is None else means
    if values is None:
        return None
    message = f"the reward was between {values.min():.3g} and {values.max():.3g}"
    if values.max() >= 0:
        return ok(message)
    return notice(f"{message}, and rises") if trend(values).rises(view.limits.trend_p) else warning(message)


def reward_jitter(view: HealthView) -> CheckResult | None:
    """A warning if the reward jumps by more than its level and does not rise."""
    recent = view.recent(REWARD, MANY_STEPS)
    if recent is None:
        return None
    spread, level = noise(recent), max(1.0, abs(float(np.median(recent))))
    message = f"the mean reward jitters by {spread:.3g} around {np.median(recent):.3g}"
    is_calm = spread <= view.limits.reward_jitter_max * level or trend(recent).rises(view.limits.trend_p)
    return ok(message) if is_calm else warning(message)


def accuracy_zero(view: HealthView) -> CheckResult | None:
    """An alarm after many epochs, a warning after many steps."""
    name = view.first_logged(CORRECT)
    if name is None:
        return None
    means = view.epochs(name, view.limits.stuck_epochs)
    if means is not None and means.max() == 0:
        return alarm(f"{name} was 0 for {view.limits.stuck_epochs} epochs")
    recent = view.recent(name, MANY_STEPS)
    if recent is None:
        return None
    if recent.max() == 0:
        return warning(f"{name} was 0 for {MANY_STEPS} steps")
    return ok(f"the last value of {name} is {recent[-1]:.3g}")


def learning_metrics(view: HealthView) -> dict[str, int]:
    """Metrics that show whether a run with rewards learns: 1 if they should rise, -1 if they should fall."""
    correct = view.first_logged(CORRECT)
    directions = {REWARD: 1, **({correct: 1} if correct else {}), VIOLATION: -1}
    return {name: better for name, better in directions.items() if view.series(name).num_points}


def nothing_improves(view: HealthView) -> CheckResult | None:
    """A warning if neither reward nor accuracy nor violation rate has improved, recently or since the start."""
    directions, count = learning_metrics(view), view.limits.stuck_epochs
    means = {name: view.epochs(name, count) for name in directions}
    known = {name: each for name, each in means.items() if each is not None}
    if not known or len(known) < len(means):
        return None
    message = ", ".join(f"{name} went from {each[0]:.3g} to {each[-1]:.3g}" for name, each in known.items())
    improves = any(
        trend(each).goes(directions[name], view.limits.improvement_p) or view.has_improved(name, directions[name])
        for name, each in known.items()
    )
    return ok(f"over {count} epochs {message}") if improves else warning(f"over {count} epochs {message}")


def milestones(view: HealthView) -> CheckResult | None:
    """A notice if a controller is behind the usual values after a number of epochs."""
    limits, every = view.limits, view.limits.milestone_epochs
    reached: list[str] = []
    missed: list[str] = []
    for name, better, expected in (
        (REWARD, 1, limits.reward_milestones),
        (ACCURACY, 1, limits.accuracy_milestones),
        (VIOLATION, -1, limits.violation_milestones),
    ):
        number = min(view.history.num_epochs(name) // every, len(expected))
        means = view.epochs(name, every)
        if number and means is not None:
            value, usual = float(means.mean()), expected[number - 1]
            message = f"{name} is {value:.3g}, and {'at least' if better > 0 else 'at most'} {usual:g} is usual"
            (missed if better * (value - usual) < 0 else reached).append(message)
    if not reached and not missed:
        return None
    message = f"after {view.history.num_epochs(REWARD)} epochs {'; '.join(missed or reached)}"
    return notice(message) if missed else ok(message)


def reward_failure_share(view: HealthView) -> tuple[float, float, int] | None:
    """Failures of reward functions per sample, then failures and samples of a step."""
    recent, samples = view.recent("train/reward_failures", at_least=3), view.context.samples_per_step
    if samples is None or recent is None:
        return None
    return float(recent.mean()) / samples, float(recent.mean()), samples


def policy_loss_size(view: HealthView) -> tuple[float] | None:
    """The largest absolute recent policy loss; None without advantages, which have their own rule."""
    recent = view.recent(LOSS)
    return None if recent is None or has_flat_advantages(view) else (float(np.abs(recent).max()),)


def has_flat_advantages(view: HealthView) -> bool:
    """Whether all recent advantages are 0, so that the loss has no policy gradient."""
    spreads = view.recent(ADV_STD)
    return spreads is not None and float(spreads.max()) < FLAT


def advantage_offset(view: HealthView) -> tuple[float, float, float] | None:
    """The mean of the advantages divided by their standard deviation, then both."""
    means, spreads = view.recent("train/adv_mean"), view.recent(ADV_STD)
    if means is None or spreads is None:
        return None
    mean, spread = float(np.median(np.abs(means))), float(np.median(spreads))
    return mean / max(spread, 1e-6), mean, spread


def format_without_correctness(view: HealthView) -> CheckResult | None:
    """A warning if the reward for format rises but the one for correctness does not."""
    form = view.first_logged(("train/reward_format_mean", "train/tag_count_reward_mean"))
    right = view.first_logged(CORRECT)
    if form is None or right is None or view.series(form).num_points < MIN_COMPARED:
        return None
    forms, answers = view.series(form).recent(), view.series(right).recent()
    gained = line_change(forms)
    message = f"{form} changed by {gained:+.3g}, {right} by {line_change(answers):+.3g}"
    has_gained = gained > 0.05 and trend(forms).rises(view.limits.trend_p_alarm)
    return warning(message) if has_gained and not trend(answers).rises(view.limits.trend_p) else ok(message)


# Budgets


def violation_high(view: HealthView) -> CheckResult | None:
    """An alarm after many epochs above `violation_alarm`, a notice after some above `violation_goal`."""
    last = view.epochs(VIOLATION, LAST_EPOCHS)
    if last is None:
        return None
    limits = view.limits
    message = f"{last[-1]:.1%} of the configurations of the last epoch were over budget"
    stuck = view.epochs(VIOLATION, limits.stuck_epochs)
    if stuck is not None and stuck.min() > limits.violation_alarm:
        return alarm(f"{message}, and more than {limits.violation_alarm:.0%} for {limits.stuck_epochs} epochs")
    has_trained = view.epochs(VIOLATION, limits.trend_epochs) is not None
    return notice(message) if has_trained and last.min() > limits.violation_goal else ok(message)


def latency_share(view: HealthView) -> tuple[float, float] | None:
    """The latency divided by the budget, then the latency in ms, over the last epochs."""
    latency = view.epochs("train/latency_ms_mean", LAST_EPOCHS)
    budget = view.epochs("train/budget_ms_mean", LAST_EPOCHS)
    if latency is None or budget is None:
        return None
    return float(latency.mean() / budget.mean()), float(latency.mean())


# Time, throughput and disk


def step_times(view: HealthView) -> tuple[str, Array, Array]:
    """What is timed, its recent times in seconds, and its mean times over segments of the run after the warm-up.

    The stage grpo times a token instead of a step, because completions may get longer.
    """
    if view.context.stage != "grpo":
        series = view.series(STEP_TIME)
        return "step", series.recent(), series.segment_means[1:]
    rates = view.series(TOKEN_RATE)
    return "token", 1 / np.maximum(rates.recent(), MIN_RATE), 1 / np.maximum(rates.segment_means[1:], MIN_RATE)


def step_time_high(view: HealthView) -> CheckResult | None:
    """A warning if steps have been slow for a minute at least."""
    timed, recent, usual = step_times(view)
    if len(usual) < WARM_UP_SEGMENTS:
        return None
    durations = view.series(STEP_TIME).recent()
    num_lasting = int(np.searchsorted(np.cumsum(durations[::-1]), LASTING_S)) + 1
    now, before = float(np.median(recent[-max(num_lasting, view.limits.window // 2) :])), float(np.median(usual))
    message = f"a {timed} takes {now:.3g} s, {before:.3g} s was usual"
    return warning(message) if now > view.limits.step_time_factor * before else ok(message)


def step_time_rising(view: HealthView) -> CheckResult | None:
    """A warning for a ramp, not a jump."""
    timed, _, times = step_times(view)
    if len(times) < 3 * WARM_UP_SEGMENTS:
        return None
    change, usual, half = line_change(times), float(np.median(times)), len(times) // 2
    message = f"the time of a {timed} changed by {change / usual:+.0%} over the run"
    is_ramp = min(line_change(times[:half]), line_change(times[half:])) > change / 5
    grows = is_ramp and change > view.limits.step_time_growth * usual and trend(times).rises(view.limits.trend_p_alarm)
    return warning(message) if grows else ok(message)


def waiting_share(view: HealthView) -> tuple[float] | None:
    """The wait for data divided by the step time."""
    steps, waits = view.recent(STEP_TIME), view.recent("time/train/data_s")
    return None if steps is None or waits is None else (float(np.median(waits) / np.median(steps)),)


def throughput_spread(view: HealthView) -> tuple[float, float] | None:
    """The spread of the throughput divided by its median, in the calmest part of the steps, then the median."""
    name = view.first_logged(("throughput/train/tokens_per_s", TOKEN_RATE, "throughput/train/configs_per_s"))
    rates = None if name is None else view.recent(name, NUM_RATES)
    if rates is None or view.series(STEP_TIME).recent(NUM_RATES).sum() < RATES_LAST_S:
        return None
    low, middle, high = np.percentile(rates.reshape(RATE_PARTS, -1), (16, 50, 84), axis=1)
    return float(((high - low) / 2 / middle).min()), float(np.median(rates))


def disk_filling(view: HealthView) -> CheckResult | None:
    """A finding if, at the rate of the last saves, only a few more fit on the disk."""
    free = view.recent("system/disk_free_gib", NUM_SAVES + 1, at_least=3)
    if free is None:
        return None
    taken = float(free[0] - free[-1]) / (len(free) - 1)
    message = f"{format_bytes(free[-1] * GIB)} are free"
    if taken <= 0 or free[-1] > view.limits.disk_saves_left * taken:
        return ok(message)
    message = f"{message}, and each save takes {format_bytes(taken * GIB)} more"
    return alarm(message) if free[-1] < 2 * taken else notice(message) if taken < 1e-3 else warning(message)
