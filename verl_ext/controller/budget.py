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

    def __init__(self, width: int, low_ms: float, high_ms: float, num_features: int = 256) -> None:
        super().__init__()
        self.low_ms, self.high_ms, self.num_features = low_ms, high_ms, num_features
        self.register_buffer("frequencies", self.make_frequencies(), persistent=False)
        self.mlp = nn.Sequential(nn.Linear(num_features, width), nn.GELU(), nn.Linear(width, width))

    def make_frequencies(self) -> torch.Tensor:
        span = self.high_ms - self.low_ms or self.high_ms
        steps = torch.linspace(0, 1, self.num_features // 2)
        return 2 * math.pi / (4 * span * (1 / 400) ** steps)

    def forward(self, budgets_ms: torch.Tensor) -> torch.Tensor:
        """Features (batch, width) of budgets (batch,) in milliseconds."""
        angles = (budgets_ms[:, None].float() - self.low_ms) * self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))
