"""What is asked of a rollout engine, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draw:
    """One completion that is wanted.

    Attributes:
        prompt_ids: the whole prompt, chat template and all.
        seed: of this draw alone, so that it does not depend on what else is drawn.
    """

    prompt_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; the names are verl's.

    Attributes:
        temperature: 0 takes the likeliest token each time.
        top_p: tokens outside the likeliest that have this probability together are never drawn.
        top_k: tokens beyond the likeliest of this number are never drawn; -1 for no limit.
        max_tokens: longest completion.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """One completion.

    Attributes:
        token_ids: the end of the turn included, where it was drawn.
        log_probs: (tokens,), float32, of each token in the distribution that it was drawn from.
        truncated: whether it ended at the longest length instead of by itself.
        text: decoded without special tokens.
    """

    token_ids: tuple[int, ...]
    log_probs: torch.Tensor
    truncated: bool
    text: str = ""
