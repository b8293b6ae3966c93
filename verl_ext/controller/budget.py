"""A latency budget as features."""

from __future__ import annotations

import math

import torch
from torch import nn


class LatencyBudgetEncoder(nn.Module):
    """Sines and cosines of a budget, then a perceptron to the width of the model; trained with the controller.

    The sinusoids are those of "Attention Is All You Need" (Vaswani et al., 2017) with their wavelengths between a
    hundredth of the budgets' span and four times the span, so that budgets that differ by 1 % of it are told apart and
    no two of the range look alike, whatever their unit.

    Args:
        width: of the output, the vision-language model's.
        low_ms: least budget of the range.
        high_ms: greatest budget of the range.
        num_features: sinusoids, half of them sines.
    """

    frequencies: torch.Tensor
    """(num_features / 2,), radians per millisecond; no part of a checkpoint."""

    def __init__(self, width: int, low_ms: float, high_ms: float, num_features: int = 256) -> None:
        super().__init__()
        self.low_ms, self.span_ms = low_ms, high_ms - low_ms or high_ms
        self.register_buffer("frequencies", torch.empty(num_features // 2), persistent=False)
        self.reset_frequencies()
        self.mlp = nn.Sequential(nn.Linear(num_features, width), nn.GELU(), nn.Linear(width, width))

    def reset_frequencies(self) -> None:
        """Fill the buffer; `from_pretrained` of transformers makes it without memory, so that `__init__` cannot."""
        steps = torch.linspace(0, 1, len(self.frequencies))
        wavelengths = 4 * self.span_ms * (1 / 400) ** steps
        self.frequencies.copy_(2 * math.pi / wavelengths)

    def forward(self, budgets_ms: torch.Tensor) -> torch.Tensor:
        """Features (batch, width) of budgets (batch,) in milliseconds."""
        angles = (budgets_ms[:, None].float() - self.low_ms) * self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))
