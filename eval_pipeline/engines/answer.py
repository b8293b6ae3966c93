"""What is asked of an engine and what it says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    problem_id: str
    prompt: str
    """The user's instruction, without any chat template."""
    sample: int = 0
    """Number of the answer to this problem, from 0."""


@dataclass(frozen=True)
class Answer:
    """What the model said to one prompt."""

    text: str
    num_tokens: int
    """New tokens, the end of the turn included."""
    truncated: bool
    """Cut off at the token limit or at the model's length."""
    error: str | None = None
    """Why there is no answer; None when there is one."""
