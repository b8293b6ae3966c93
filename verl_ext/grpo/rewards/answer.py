"""The argument of a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewardedAnswer:
    """A model's answer and the columns of its row, with the names of verl's RL data.

    Attributes:
        sample_id: identifies the prompt in messages.
        text: the answer without special tokens.
        num_tokens: number of tokens, including the end-of-turn token.
        truncated: whether the answer was truncated at `data.max_response_length`.
        data_source: column `data_source`.
        ground_truth: column `reward_model.ground_truth`: the correct answer, or tests, possibly as JSON.
        extra_info: column `extra_info`.
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
        """Build an answer to a row of the data; the other arguments are attributes of the class."""
        return cls(
            sample_id,
            text,
            num_tokens,
            truncated,
            data_source=str(row.get("data_source") or ""),
            ground_truth=(row.get("reward_model") or {}).get("ground_truth"),
            extra_info=row.get("extra_info") or {},
        )
