"""What a reward function gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewardedAnswer:
    """A model's answer and its ground truth; the names are those of verl's RL data.

    Attributes:
        sample_id: names the prompt in messages.
        text: the answer without special tokens.
        num_tokens: its length, with the end-of-turn token.
        truncated: whether it was cut off at `data.max_response_length`.
        data_source: of the row.
        ground_truth: `reward_model.ground_truth` of the row: the correct answer, or tests, also as JSON.
        extra_info: of the row.
    """

    sample_id: str
    text: str
    num_tokens: int
    truncated: bool
    data_source: str
    ground_truth: Any
    extra_info: Mapping[str, Any]

    @classmethod
    def to_prompt(
        cls, sample_id: str, row: Mapping[str, Any], text: str, num_tokens: int, truncated: bool = False
    ) -> RewardedAnswer:
        """An answer to a row of the data; the other arguments are those of the class."""
        return cls(
            sample_id,
            text,
            num_tokens,
            truncated,
            data_source=str(row.get("data_source") or ""),
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=row.get("extra_info") or {},
        )
