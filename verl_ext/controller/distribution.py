"""The controller's distribution over configurations: exact log-probabilities, samples, entropy and mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from verl_ext.controller.space import Configuration, ConfigurationSpace

LOG_ZERO = -1e30
"""Finite value for log 0, so that differences are not NaN."""


class BlockMaskDistribution:
    """P(mask) = exp(sum of the logits of its blocks) / Z over all masks of `min_blocks` to `max_blocks` blocks.

    This is the conditional Bernoulli distribution (Chen, Dempster and Liu, "Weighted finite population sampling to
    maximize entropy", Biometrika 81, 1994) for a range of sizes instead of a single size. All quantities are computed
    from a table over (block, number of blocks chosen before it), in O(blocks * max_blocks) per row. The table is in
    double precision for logits of any precision.

    Args:
        logits: (batch, blocks), logits of the blocks that may be skipped, without the model's block 0.
        min_blocks: minimum number of these blocks that run.
        max_blocks: maximum number of these blocks that run.
    """

    def __init__(self, logits: torch.Tensor, min_blocks: int, max_blocks: int) -> None:
        self.logits, self.num_blocks = logits.double(), logits.shape[1]
        self.min_blocks, self.max_blocks = min_blocks, max_blocks

    @cached_property  # a deployed controller needs only the mode, which does not use the tables
    def _tables(self) -> list[torch.Tensor]:
        """[i][:, c]: log of the sum over blocks i and later, with c chosen before them; the last column is log 0."""
        end = self.logits.new_full((len(self.logits), self.max_blocks + 2), LOG_ZERO)
        end[:, self.min_blocks : self.max_blocks + 1] = 0.0
        tables = [end]
        for i in reversed(range(self.num_blocks)):
            chosen = self.logits[:, i, None] + tables[0][:, 1:]
            table = torch.logaddexp(tables[0][:, :-1], chosen)
            tables.insert(0, torch.cat([table, end[:, -1:]], dim=1))
        return tables

    def log_prob(self, masks: torch.Tensor) -> torch.Tensor:
        """Log-probability of each mask, (batch,), in double precision.

        Args:
            masks: (batch, blocks), bool; each must have an allowed number of active blocks.
        """
        log_z = self._tables[0][:, 0]
        return (self.logits * masks).sum(-1) - log_z

    def _log_prob_of_block(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of running and of skipping block i, (batch, max_blocks + 1) by the number chosen before."""
        here, after = self._tables[i][:, :-1], self._tables[i + 1]
        reachable = here > LOG_ZERO / 2
        run = torch.where(reachable, self.logits[:, i, None] + after[:, 1:] - here, LOG_ZERO)
        skip = torch.where(reachable, after[:, :-1] - here, LOG_ZERO)
        return run, skip

    def sample(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Sample masks (batch, blocks), bool, block by block with exact probabilities.

        Args:
            uniforms: (batch, blocks), a random number in [0, 1) for each decision.
        """
        masks = torch.zeros_like(uniforms, dtype=torch.bool)
        for i in range(self.num_blocks):
            run, _ = self._log_prob_of_block(i)
            num_chosen = masks.sum(1, keepdim=True)
            masks[:, i] = uniforms[:, i] < run.gather(1, num_chosen)[:, 0].exp()
        return masks

    def mode(self) -> torch.Tensor:
        """The most likely mask of each row, (batch, blocks) bool: the blocks with the highest logits."""
        ranks = self.logits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        count = (self.logits > 0).sum(1).clamp(self.min_blocks, self.max_blocks)
        return ranks < count[:, None]

    def entropy(self, entropy_of_active: torch.Tensor | None = None) -> torch.Tensor:
        """Entropy in nats, (batch,), with gradient.

        Args:
            entropy_of_active: (batch, blocks), entropy of the further decisions about each block that runs.
        """
        extra = torch.zeros_like(self.logits) if entropy_of_active is None else entropy_of_active.double()
        expected = torch.zeros_like(self._tables[-1][:, :-1])
        for i in reversed(range(self.num_blocks)):
            run, skip = self._log_prob_of_block(i)
            after = torch.cat([expected[:, 1:], torch.zeros_like(expected[:, :1])], dim=1)
            value_run, value_skip = extra[:, i, None] + after - run, expected - skip
            expected = run.exp() * value_run + skip.exp() * value_skip
        return expected[:, 0]


@dataclass(frozen=True)
class Choices:
    """The configurations of a batch, as tensors.

    Attributes:
        tiers: (batch,), indices into the space's tiers.
        masks: (batch, blocks - 1) bool, whether each block after block 0 runs.
        topk: (batch, blocks - 1), indices into the space's `topk_choices`; ignored for skipped blocks.
    """

    tiers: torch.Tensor
    masks: torch.Tensor
    topk: torch.Tensor

    def configurations(self, space: ConfigurationSpace) -> list[Configuration]:
        """One configuration per row."""
        rows = zip(self.tiers.tolist(), self.masks.tolist(), self.topk.tolist(), strict=True)
        return [
            space.configuration(tier, [True, *mask], [0, *(space.topk_choices[k] for k in topk)] if topk else None)
            for tier, mask, topk in rows
        ]

    @classmethod
    def of(cls, configurations: Sequence[Configuration], space: ConfigurationSpace) -> Choices:
        """Convert configurations to tensors on the CPU.

        Raises:
            ValueError: a number of experts is not among the space's `topk_choices`.
        """
        topk = [[space.topk_choices.index(k) if k else 0 for k in each.topk[1:]] for each in configurations]
        return cls(
            torch.tensor([each.tier for each in configurations]),
            torch.tensor([each.blocks[1:] for each in configurations], dtype=torch.bool),
            torch.tensor(topk, dtype=torch.long).reshape(len(configurations), -1),
        )


class ConfigurationDistribution:
    """Tier, block mask and the top-k of each active block; independent, except that only active blocks have a top-k.

    Args:
        tier_logits: (batch, tiers).
        block_logits: (batch, blocks - 1).
        block_topk_logits: (batch, blocks, choices); block 0 is ignored, because its top-k is fixed. The last dimension
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
        self._masks = BlockMaskDistribution(block_logits, space.min_active - 1, space.max_active - 1)
        self._topk = block_topk_logits[:, 1:].double().log_softmax(-1) if space.topk_choices else None

    def log_prob(self, choices: Choices) -> torch.Tensor:
        """Log-probability of each row's configuration, (batch,), in double precision, with gradient."""
        log_prob = self._tiers.gather(1, choices.tiers[:, None])[:, 0] + self._masks.log_prob(choices.masks)
        if self._topk is None:
            return log_prob
        of_topk = self._topk.gather(2, choices.topk[..., None])[..., 0]
        return log_prob + (of_topk * choices.masks).sum(-1)

    @property
    def tier_entropy(self) -> torch.Tensor:
        """Entropy of the tier in nats, (batch,)."""
        return categorical_entropy(self._tiers)

    def entropy_bonus(self, tier_weight: float) -> torch.Tensor:
        """Entropy in nats, (batch,), with a weight for the tier and a modified gradient.

        Each active block adds the entropy of its top-k, so a plain entropy bonus would reward running more blocks.
        Therefore the gradient of the experts' entropy treats the probabilities of the blocks as constants.
        """
        constant = BlockMaskDistribution(self._masks.logits.detach(), self._masks.min_blocks, self._masks.max_blocks)
        topk_entropy = None if self._topk is None else categorical_entropy(self._topk)
        experts = constant.entropy(topk_entropy) - constant.entropy()
        return tier_weight * self.tier_entropy + self._masks.entropy() + experts

    @torch.no_grad()
    def sample(self, uniforms: torch.Tensor) -> Choices:
        """Sample by inverse transform sampling.

        Args:
            uniforms: (batch, `num_uniforms(space)`), a random number in [0, 1) for each decision; numbers for skipped
                blocks are ignored.
        """
        rest = self._masks.num_blocks
        masks = self._masks.sample(uniforms[:, 1 : 1 + rest])
        tiers = inverse_cdf(self._tiers, uniforms[:, 0])
        return Choices(tiers, masks, self._choose_topk(lambda topk: inverse_cdf(topk, uniforms[:, 1 + rest :]), masks))

    @torch.no_grad()
    def mode(self) -> Choices:
        """The most likely tier, the most likely mask, and the most likely top-k of each active block.

        This can differ from the most likely configuration, which may skip a block that nearly always runs, if its
        probability is divided between several top-k.
        """
        masks = self._masks.mode()
        return Choices(self._tiers.argmax(-1), masks, self._choose_topk(lambda topk: topk.argmax(-1), masks))

    def _choose_topk(self, choose: Callable[[torch.Tensor], torch.Tensor], masks: torch.Tensor) -> torch.Tensor:
        if self._topk is None:
            return torch.zeros(len(masks), 0, dtype=torch.long, device=masks.device)
        return choose(self._topk) * masks  # 0 for skipped blocks, so that equal choices have equal tensors


def categorical_entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Entropy in nats over the last dimension."""
    return -(log_probs.exp() * log_probs).sum(-1)


def inverse_cdf(log_probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The category of each number (...) in [0, 1), given log-probabilities (..., categories)."""
    bounds = log_probs.exp().cumsum(-1)
    return (uniforms[..., None] >= bounds).sum(-1).clamp(max=log_probs.shape[-1] - 1)


def num_uniforms(space: ConfigurationSpace) -> int:
    """Number of random numbers per row for `ConfigurationDistribution.sample`."""
    return 1 + 2 * (space.num_blocks - 1)
