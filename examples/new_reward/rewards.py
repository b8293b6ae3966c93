"""Two reward functions for answers that end with a number in <answer>: how near it is, and how short the answer is."""

from __future__ import annotations

import re
from typing import Any

from verl_ext.grpo.rewards.answer import RewardedAnswer

_ANSWER = re.compile(r"<answer>\s*(-?\d+(?:\.\d+)?)\s*</answer>")


def nearness(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
    """1 for the right number, less the further it is off, 0 without one.

    Named by file (`rewards.py:nearness`) it is called with verl's arguments, in a process of its own that is killed
    when a call takes longer than `reward.time_limit_s`.
    """
    found = _ANSWER.search(solution_str)
    if found is None:
        return 0.0
    wanted = float(ground_truth)
    return max(0.0, 1.0 - abs(float(found[1]) - wanted) / max(abs(wanted), 1.0))


def brevity(answer: RewardedAnswer) -> float:
    """From 1 for an answer of one token down to 0 for one that was cut off.

    Named by module (`examples.new_reward.rewards:brevity`) it is called in the rank itself, with all that the rank
    knows of the answer, and must be quick.
    """
    return 0.0 if answer.truncated else 1.0 / answer.num_tokens
