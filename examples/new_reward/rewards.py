"""Two reward functions for answers that end with a number in <answer>: how close it is, and how short the answer is."""

from __future__ import annotations

import re
from typing import Any

from verl_ext.grpo.rewards.answer import RewardedAnswer

_ANSWER = re.compile(r"<answer>\s*(-?\d+(?:\.\d+)?)\s*</answer>")


def nearness(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 for the right number, less the further off it is, 0 without a number.

    If the recipe names it as `rewards.py:nearness`, it runs in its own process with verl's arguments. The process is
    killed if a call takes longer than `reward.time_limit_s`.
    """
    found = _ANSWER.search(solution_str)
    if found is None:
        return 0.0
    wanted = float(ground_truth)
    return max(0.0, 1.0 - abs(float(found[1]) - wanted) / max(abs(wanted), 1.0))


def brevity(answer: RewardedAnswer) -> float:
    """From 1 for an answer of one token down to 0 for an answer that was cut off.

    If the recipe names it as `examples.new_reward.rewards:brevity`, it runs in the rank itself, with everything that
    the rank knows about the answer, and must be fast.
    """
    return 0.0 if answer.truncated else 1.0 / answer.num_tokens
