"""The reward of the GRPO benchmark: cheap, and different within a group, so that every sample has an advantage."""

from __future__ import annotations

from typing import Any


def score(solution_str: str) -> float:
    """Share of different characters."""
    return len(set(solution_str)) / max(len(solution_str), 1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """The same with verl's signature."""
    return score(solution_str)


def variety(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """The same with TRL's."""
    return [score(completion[0]["content"]) for completion in completions]
