"""The controller's distribution over configurations, made of its three kinds of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.masks import BlockMasks


@dataclass(frozen=True)
class Choices:
    """What was chosen for each row of a batch.

    Attributes:
        tiers: (batch,), places in the space's list of tiers.
        masks: (batch, blocks - 1) bool, whether each block after block 0 runs.
        topk: (batch, blocks - 1), places in the space's list of top-k; of no meaning where the block does not run.
    """

    tiers: torch.Tensor
    masks: torch.Tensor
    topk: torch.Tensor

    def configurations(self, space: ConfigurationSpace) -> list[Configuration]:
        """The same as configurations, one for each row."""
        rows = zip(self.tiers.tolist(), self.masks.tolist(), self.topk.tolist(), strict=True)
        return [
            space.configuration(tier, [True, *mask], [0, *(space.topk_choices[k] for k in topk)] if topk else None)
            for tier, mask, topk in rows
        ]

    @classmethod
    def of(cls, configurations: Sequence[Configuration], space: ConfigurationSpace, device: str = "cpu") -> Choices:
        """The choices that give configurations of the space.

        Raises:
            ValueError: one has a number of experts that the space does not offer.
        """
        offered = space.topk_choices
        topk = [[offered.index(k) if k else 0 for k in each.topk[1:]] for each in configurations]
        return cls(
            torch.tensor([each.tier for each in configurations], device=device),
            torch.tensor([each.blocks[1:] for each in configurations], dtype=torch.bool, device=device),
            torch.tensor(topk, dtype=torch.long, device=device).reshape(len(configurations), -1),
        )


class ConfigurationDistribution:
    """Tier, block mask, and for each block that runs its top-k, independent but for that last condition.

    Args:
        space: what can be chosen.
        tier_logits: (batch, tiers).
        block_logits: (batch, blocks - 1).
        block_topk_logits: (batch, blocks, choices); those of block 0, which is fixed, are not used. The last dimension
            is 0 for a model without experts.
    """

    def __init__(
        self,
        space: ConfigurationSpace,
        tier_logits: torch.Tensor,
        block_logits: torch.Tensor,
        block_topk_logits: torch.Tensor,
    ) -> None:
        self._tiers = tier_logits.double().log_softmax(-1)
        self._masks = BlockMasks(block_logits, space.min_active - 1, space.max_active - 1)
        self._topk = block_topk_logits[:, 1:].double().log_softmax(-1) if space.topk_choices else None

    def log_prob(self, choices: Choices) -> torch.Tensor:
        """Log-probability of each row's choice, (batch,), double precision, with gradient."""
        found = self._tiers.gather(1, choices.tiers[:, None])[:, 0] + self._masks.log_prob(choices.masks)
        if self._topk is None:
            return found
        of_choices = self._topk.gather(2, choices.topk[..., None])[..., 0]
        return found + (of_choices * choices.masks).sum(-1)

    def entropy(self) -> torch.Tensor:
        """Entropy in nats, (batch,), with gradient."""
        return entropy_of(self._tiers) + self._masks.entropy(self._entropy_of_topk)

    def exploration(self, tier_weight: float = 1.0) -> torch.Tensor:
        """What an entropy bonus is paid for, (batch,): the entropy, but for two things.

        A block that runs has a top-k to choose, so that the entropy grows with every block. A bonus for it would be one
        for running all of the model; so the gradient of the experts' part holds the blocks' probabilities fixed.

        Args:
            tier_weight: times that the tiers' part counts.
        """
        fixed = self._masks.detached()
        of_experts = fixed.entropy(self._entropy_of_topk) - fixed.entropy()
        return tier_weight * entropy_of(self._tiers) + self._masks.entropy() + of_experts

    @property
    def _entropy_of_topk(self) -> torch.Tensor | None:
        return None if self._topk is None else entropy_of(self._topk)

    @torch.no_grad()
    def sample_by(self, uniform: torch.Tensor) -> Choices:
        """The choices that random numbers in [0, 1) give.

        Args:
            uniform: (batch, 1 + 2 * (blocks - 1)), one number for each decision, whether or not it comes to matter.
        """
        rest = self._masks.num_blocks
        masks = self._masks.sample_by(uniform[:, 1 : 1 + rest])
        tiers = inverse_of_cdf(self._tiers, uniform[:, 0])
        return Choices(tiers, masks, self._topk_by(lambda topk: inverse_of_cdf(topk, uniform[:, 1 + rest :]), masks))

    @torch.no_grad()
    def mode(self) -> Choices:
        """The likeliest tier, the likeliest mask, and the likeliest top-k of its blocks.

        Not the likeliest configuration of all: that would leave out a block which nearly always runs, but with one
        top-k as often as with another.
        """
        masks = self._masks.mode()
        return Choices(self._tiers.argmax(-1), masks, self._topk_by(lambda topk: topk.argmax(-1), masks))

    def _topk_by(self, choose: Callable[[torch.Tensor], torch.Tensor], masks: torch.Tensor) -> torch.Tensor:
        if self._topk is None:
            return torch.zeros(len(masks), 0, dtype=torch.long, device=masks.device)
        return choose(self._topk) * masks  # of blocks that do not run always the first, so that equal choices are equal


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats over the last dimension."""
    return -(log_probs.exp() * log_probs).sum(-1)


def inverse_of_cdf(log_probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The category that each number in [0, 1) falls into, of shape (...).

    Args:
        log_probs: (..., categories).
        uniform: (...).
    """
    bounds = log_probs.exp().cumsum(-1)
    return (uniform[..., None] >= bounds).sum(-1).clamp(max=log_probs.shape[-1] - 1)


def number_of_decisions(space: ConfigurationSpace) -> int:
    """How many random numbers `ConfigurationDistribution.sample_by` needs for a row."""
    return 1 + 2 * (space.num_blocks - 1)
