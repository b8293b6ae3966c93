"""Rules on what a language model draws."""

from __future__ import annotations

import numpy as np

from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.history import History
from verl_ext.health.rule import Rule, rule
from verl_ext.health.rules.reward import TOTAL
from verl_ext.health.trends import noise_of

ROLLOUT: list[Rule] = []
ENTROPY = "train/entropy"
LENGTH, PROMPT, GAP = "train/seq_completion_len_mean", "train/seq_prompt_len_max", "train/rollout_logprob_diff_mean"
EARLY = 30
"""Steps before which a beginning is no beginning to compare with."""


@rule(
    ENTROPY,
    TOTAL,
    advice="raise actor.entropy_coeff or the temperature, or lower optim.lr",
    into=ROLLOUT,
    stages={"grpo"},
)
def entropy_collapse(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The entropy is a small part of what it was; only a notice where the reward rose on the way."""
    return _shrunk(history, limits, ENTROPY, limits.entropy_share_min, "the entropy went from {:.3g} to {:.3g} nat")


@rule(
    LENGTH,
    TOTAL,
    advice="read samples.jsonl: short answers may be a way around the reward",
    into=ROLLOUT,
    stages={"grpo"},
)
def completions_shortening(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """Completions are half as long as they were; only a notice where the reward rose on the way."""
    return _shrunk(history, limits, LENGTH, limits.length_share_min, "completions went from {:.0f} to {:.0f} tokens")


@rule(LENGTH, advice="raise data.max_response_length: answers are cut off", into=ROLLOUT, stages={"grpo"})
def completions_at_limit(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The mean completion is practically as long as is allowed."""
    recent = history.series(LENGTH).recent(limits.window)
    if facts.max_response_length is None or len(recent) < 3:
        return None
    told = f"completions have {np.median(recent):.0f} of at most {facts.max_response_length} tokens"
    return notice(told) if np.median(recent) > 0.95 * facts.max_response_length else ok(told)


@rule(
    PROMPT, advice="raise data.max_prompt_length: longer prompts are refused or left out", into=ROLLOUT, stages={"grpo"}
)
def prompts_at_limit(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The longest prompts are as long as is allowed."""
    recent = history.series(PROMPT).recent(limits.window)
    if facts.max_prompt_length is None or not len(recent):
        return None
    told = f"the longest prompt has {recent.max():.0f} of at most {facts.max_prompt_length} tokens"
    return notice(told) if recent.max() >= facts.max_prompt_length else ok(told)


@rule(
    GAP,
    advice="give engine and trainer one number type, or set algorithm.rollout_correction.rollout_is",
    into=ROLLOUT,
    stages={"grpo"},
)
def logprob_gap(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
    """The engine that draws and the trainer that learns disagree about probabilities."""
    recent = history.series(GAP).recent(limits.window)
    if len(recent) < 3:
        return None
    gap = float(np.median(recent))
    told = f"engine and trainer differ by {gap:.3g} nat a token"
    return alarm(told) if gap > limits.logprob_gap_alarm else warning(told) if gap > limits.logprob_gap else ok(told)


def _shrunk(history: History, limits: HealthLimits, name: str, share: float, form: str) -> Seen | None:
    """Whether a metric is below a share of what it was at first; less grave where the reward rose on the way."""
    series = history.series(name)
    if series.num_points < EARLY:
        return None
    first, now = float(series.first.mean()), float(np.median(series.recent(limits.window)))
    told = form.format(first, now)
    if now > share * first:
        return ok(told)
    return notice(f"{told}, and the reward rose") if _reward_rose(history, limits) else warning(told)


def _reward_rose(history: History, limits: HealthLimits) -> bool:
    series = history.series(TOTAL)
    if not series.num_points:
        return False
    risen = float(np.median(series.recent(limits.window))) - float(series.first.mean())
    return risen > 4 * noise_of(series.recent()) / np.sqrt(min(len(series.first), limits.window))
