"""Rewards that only look at the text, as specified for GSM8K."""

from __future__ import annotations

import re

from verl_ext.grpo.rewards.answer import RewardedAnswer

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_SHARE = 1 / len(TAGS)
# no two parts can match the same text, so that no answer makes the search slow
_INSIDE = r"(?:(?!</?think>|</?answer>).)*"
_FORMAT = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*", re.DOTALL)


def reward_format(answer: RewardedAnswer) -> float:
    """1 for `<think>...</think>` and then `<answer>...</answer>`, and nothing beside; else 0."""
    return float(_FORMAT.fullmatch(answer.text) is not None)


def tag_count_reward(answer: RewardedAnswer) -> float:
    """0.25 for each of the four tags that occurs exactly once."""
    return _SHARE * sum(answer.text.count(tag) == 1 for tag in TAGS)
