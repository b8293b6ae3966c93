"""Counts floating-point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def flop_counter() -> FlopCounterMode:
    """torch's counter, which counts the matrix products of experts too; torch 2.13 has no formula for grouped ones."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_mm_flops})


def grouped_mm_flops(tokens: torch.Size, weights: torch.Size, *_: Any, **__: Any) -> int:
    """Of tokens (tokens, in), sorted by expert, and weights (experts, in, out): each token meets one expert."""
    return 2 * tokens[0] * weights[-2] * weights[-1]
