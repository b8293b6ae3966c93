"""The controller's network, which computes logits over configurations from image, question and budget features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from verl_ext.controller.space import ConfigurationSpace
from verl_ext.model_files import CONTROLLER_TYPE

NUM_SINUSOIDS = 256
Logits = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Logits of tiers (batch, tiers), blocks (batch, blocks - 1) and top-k (batch, blocks, choices); choices may be 0."""


class LatencyBudgetEncoder(nn.Module):
    """Encodes a budget with sinusoids and a perceptron that is trained with the controller.

    The sinusoids follow "Attention Is All You Need" (Vaswani et al., 2017). Their wavelengths range from a hundredth
    of the budget range to four times the range. So in any unit, no two budgets in the range have the same features, and
    budgets that differ by 1% of the range are well separated.

    Args:
        width: output width, equal to the width of the vision-language model.
    """

    frequencies: torch.Tensor
    """(NUM_SINUSOIDS / 2,), radians per millisecond; not saved."""

    def __init__(self, width: int, low_ms: float, high_ms: float) -> None:
        super().__init__()
        self.low_ms, self.span_ms = low_ms, high_ms - low_ms or high_ms
        self.register_buffer("frequencies", torch.empty(NUM_SINUSOIDS // 2), persistent=False)
        self.reset_frequencies()
        self.mlp = nn.Sequential(nn.Linear(NUM_SINUSOIDS, width), nn.GELU(), nn.Linear(width, width))

    def reset_frequencies(self) -> None:
        """Fill the buffer; needed after `from_pretrained`, which runs `__init__` on the meta device."""
        steps = torch.linspace(0, 1, len(self.frequencies))
        wavelengths = 4 * self.span_ms * (1 / 400) ** steps
        self.frequencies.copy_(2 * math.pi / wavelengths)

    def forward(self, budgets_ms: torch.Tensor) -> torch.Tensor:
        """Features (batch, width) of budgets (batch,) in milliseconds."""
        angles = (budgets_ms[:, None].float() - self.low_ms) * self.frequencies
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=-1))


class BudgetControllerConfig(PretrainedConfig):
    """The `config.json` of an exported controller.

    Args:
        tiers: see `ConfigurationSpace`, also for the next four arguments.
        vision_width: width of the image features, mean-pooled over the patches of the global crop.
        language_width: width of the mean-pooled token embeddings, and of the budget's features.
        low_ms: lowest budget in training.
        high_ms: highest budget in training.
        hidden: width of the hidden layers.
        dropout: dropout of the hidden layers in training.
        vlm: the vision-language model that the controller was trained for, see `ControlledModel`.
    """

    model_type = CONTROLLER_TYPE

    def __init__(
        self,
        tiers: tuple[str, ...] = ("low", "medium", "high"),
        num_blocks: int = 16,
        min_active: int = 12,
        max_active: int = 16,
        topk_choices: tuple[int, ...] = (4, 5, 6, 7, 8),
        vision_width: int = 2048,
        language_width: int = 2048,
        low_ms: float = 170.0,
        high_ms: float = 380.0,
        hidden: int = 256,
        dropout: float = 0.1,
        vlm: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.tiers, self.num_blocks, self.topk_choices = list(tiers), num_blocks, list(topk_choices)
        self.min_active, self.max_active = min_active, max_active
        self.vision_width, self.language_width = vision_width, language_width
        self.low_ms, self.high_ms = low_ms, high_ms
        self.hidden, self.dropout = hidden, dropout
        self.vlm = dict(vlm or {})
        super().__init__(**kwargs)

    @property
    def space(self) -> ConfigurationSpace:
        """The configurations that the controller can choose."""
        return ConfigurationSpace(
            tuple(self.tiers), self.num_blocks, self.min_active, self.max_active, tuple(self.topk_choices)
        )


class BudgetController(PreTrainedModel):
    """A perceptron over three projections, with a head each for tier, blocks and top-k; a transformers model."""

    config_class = BudgetControllerConfig
    base_model_prefix = "controller"
    _no_split_modules = ["LatencyBudgetEncoder"]  # FSDP2 shards it separately

    def __init__(self, config: BudgetControllerConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # tracing reads every attribute, and transformers warns about an unset loss
        self.space = config.space
        hidden, num_choices = config.hidden, len(config.topk_choices)
        self.budget_encoder = LatencyBudgetEncoder(config.language_width, config.low_ms, config.high_ms)
        widths = {"vision": config.vision_width, "language": config.language_width, "budget": config.language_width}
        # The scale of the features depends on the model, so each kind is normalized before its projection.
        self.projections = nn.ModuleDict(
            {name: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden)) for name, width in widths.items()}
        )
        self.trunk = nn.Sequential(
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(len(widths) * hidden, hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(hidden, hidden),
            nn.GELU(),
        )
        self.tier_head = nn.Linear(hidden, len(config.tiers))
        self.block_head = nn.Linear(hidden, config.num_blocks - 1)
        self.topk_head = nn.Linear(hidden, config.num_blocks * num_choices) if num_choices else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the heads with zeros, so that training starts from uniform configurations; preserve variances.

        The other layers are orthogonal with a gain of sqrt(2), as is usual for policies ("The 37 Implementation
        Details of Proximal Policy Optimization", Huang et al., 2022). With smaller weights, differences between samples
        would shrink toward the heads, which would first learn a single configuration for all samples.
        """
        if isinstance(module, LatencyBudgetEncoder):
            module.reset_frequencies()
        if isinstance(module, nn.Linear):
            if module in (self.tier_head, self.block_head, self.topk_head):
                nn.init.zeros_(module.weight)
            else:
                nn.init.orthogonal_(module.weight, math.sqrt(2))
            nn.init.zeros_(module.bias)

    def init_block_bias(self, scores: Mapping[int, float]) -> None:
        """Make a new controller prefer important blocks: set each block's logit to the z-score of its importance."""
        values = torch.tensor([scores[block] for block in range(1, self.space.num_blocks)])
        with torch.no_grad():
            # without a correction, because the standard deviation of a single value would be NaN with it
            self.block_head.bias.copy_((values - values.mean()) / values.std(correction=0).clamp(min=1e-12))

    def forward(self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: torch.Tensor) -> Logits:
        """Compute logits from features (batch, vision_width) and (batch, language_width), and budgets (batch,)."""
        return self.logits(vision, language, self.budget_features(budgets_ms))

    def budget_features(self, budgets_ms: torch.Tensor) -> torch.Tensor:
        """The trunk's input (batch, hidden) for budgets (batch,) in milliseconds."""
        return self.projections["budget"](self.budget_encoder(budgets_ms))

    def logits(self, vision: torch.Tensor, language: torch.Tensor, budget: torch.Tensor) -> Logits:
        """Like `forward`, with budgets given as features (batch, hidden)."""
        parts = [self.projections["vision"](vision), self.projections["language"](language), budget]
        hidden = self.trunk(torch.cat(parts, dim=-1))
        batch, blocks = hidden.shape[0], self.space.num_blocks
        topk = hidden.new_zeros(batch, blocks, 0) if self.topk_head is None else self.topk_head(hidden)
        # Not a view, because FSDP2's hook on an output that is a view would be lost on in-place changes.
        topk = topk.reshape(batch, blocks, len(self.space.topk_choices)).clone()
        return self.tier_head(hidden), self.block_head(hidden), topk
