"""The penalty for answers that come near the longest length."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.grpo.rewards.answer import RewardedAnswer


@dataclass(frozen=True)
class LengthPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    Attributes:
        max_tokens: the longest length of an answer.
        buffer: the last tokens before it, over which the penalty grows from 0 to -1.
    """

    max_tokens: int
    buffer: int

    def __call__(self, answer: RewardedAnswer) -> float:
        """From -1 to 0; -1 for an answer that was cut off."""
        if answer.truncated:
            return -1.0
        over = answer.num_tokens - (self.max_tokens - self.buffer)
        return -min(max(over / self.buffer, 0.0), 1.0)
