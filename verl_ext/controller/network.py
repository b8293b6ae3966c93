"""The controller itself: features of image, question and budget in, logits over configurations out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from verl_ext.controller.budget import LatencyBudgetEncoder
from verl_ext.controller.configuration import ConfigurationSpace
from verl_ext.controller.distribution import ConfigurationDistribution


class BudgetControllerConfig(PretrainedConfig):
    """What a saved controller needs to be built again.

    Args:
        tiers: see `ConfigurationSpace`, as the next four.
        num_blocks: of the vision-language model.
        min_active: fewest of them that run.
        max_active: most of them that run.
        topk_choices: numbers of experts; empty for a model without experts.
        vision_width: of the mean-pooled patches of the global crop.
        language_width: of the mean-pooled token embeddings, and of the budget's features.
        low_ms: least budget that it is trained for, milliseconds.
        high_ms: greatest budget that it is trained for, milliseconds.
        hidden: width inside.
        dropout: share of the inner features that training leaves out.
        vlm: the vision-language model that it was trained for and how that is asked, see `ControlledModel`.
    """

    model_type = "budget_controller"

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
        """What the controller chooses from."""
        return ConfigurationSpace(
            tuple(self.tiers), self.num_blocks, self.min_active, self.max_active, tuple(self.topk_choices)
        )


class BudgetController(PreTrainedModel):
    """A perceptron over three projections, with a head for each knob; saved and loaded as any model of transformers."""

    config_class = BudgetControllerConfig
    base_model_prefix = "controller"
    _no_split_modules = ["LatencyBudgetEncoder"]  # FSDP2 shards it by itself, and the rest together

    def __init__(self, config: BudgetControllerConfig) -> None:
        super().__init__(config)
        self.loss_type = "ForCausalLM"  # tracing asks for every attribute, and transformers warns of a loss unnamed
        self.space = config.space
        hidden, choices = config.hidden, len(config.topk_choices)
        self.budget_encoder = LatencyBudgetEncoder(config.language_width, config.low_ms, config.high_ms)
        widths = {"vision": config.vision_width, "language": config.language_width, "budget": config.language_width}
        # Features come as the model has them, of any scale; each kind is brought to one before it is projected.
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
        self.topk_head = nn.Linear(hidden, config.num_blocks * choices) if choices else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The heads are zero, so that the first configurations are drawn evenly; all before them keeps variances.

        What tells samples apart would otherwise fade on its way to the heads, and they would learn one configuration
        for all before they learn whom it suits. Orthogonal with a gain of sqrt(2), as is usual for policies ("The 37
        Implementation Details of Proximal Policy Optimization", Huang et al., 2022).
        """
        if isinstance(module, LatencyBudgetEncoder):
            module.reset_frequencies()
        if isinstance(module, nn.Linear):
            if module in (self.tier_head, self.block_head, self.topk_head):
                nn.init.zeros_(module.weight)
            else:
                nn.init.orthogonal_(module.weight, math.sqrt(2))
            nn.init.zeros_(module.bias)

    def prefer(self, scores: Mapping[int, float]) -> None:
        """Have a new controller prefer some blocks.

        Args:
            scores: importance by block; the logits become its distance from the mean, in standard deviations.
        """
        values = torch.tensor([scores[block] for block in range(1, self.space.num_blocks)])
        with torch.no_grad():
            self.block_head.bias.copy_((values - values.mean()) / values.std().clamp(min=1e-12))

    def forward(
        self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits `tier_logits` (batch, tiers), `block_logits` (batch, blocks - 1), `block_topk_logits` (batch, blocks,
        choices), the last dimension of which is 0 for a model without experts.

        Args:
            vision: (batch, vision_width).
            language: (batch, language_width).
            budgets_ms: (batch,), milliseconds.
        """
        return self.logits(vision, language, self.budget_features(budgets_ms))

    def budget_features(self, budgets_ms: torch.Tensor) -> torch.Tensor:
        """What the trunk sees of budgets (batch,) in milliseconds: (batch, hidden)."""
        return self.projections["budget"](self.budget_encoder(budgets_ms))

    def logits(
        self, vision: torch.Tensor, language: torch.Tensor, budget: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `forward` gives, where the budgets' features (batch, hidden) are known."""
        parts = [self.projections["vision"](vision), self.projections["language"](language), budget]
        hidden = self.trunk(torch.cat(parts, dim=-1))
        batch, blocks = hidden.shape[0], self.space.num_blocks
        topk = hidden.new_zeros(batch, blocks, 0) if self.topk_head is None else self.topk_head(hidden)
        return (
            self.tier_head(hidden),
            self.block_head(hidden),
            topk.reshape(batch, blocks, len(self.space.topk_choices)),
        )

    def distribution(
        self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: torch.Tensor
    ) -> ConfigurationDistribution:
        """The distribution that the logits make; the arguments are those of `forward`."""
        return ConfigurationDistribution(self.space, *self(vision, language, budgets_ms))
