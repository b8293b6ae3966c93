"""Configurations of a vision-language model, and the space from which a controller chooses one."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_ext.controller.config import require_ascending
from verl_ext.errors import UserError


@dataclass(frozen=True)
class Configuration:
    """The parts of a model that run for one sample.

    Attributes:
        tier: index of the tier; 0 has the fewest crops or pixels.
        blocks: whether each transformer block runs; the first one always does.
        topk: experts per token of each block; 0 for a skipped block, empty for a model without experts.
    """

    tier: int
    blocks: tuple[bool, ...]
    topk: tuple[int, ...] = ()

    @property
    def num_active(self) -> int:
        """Number of blocks that run."""
        return sum(self.blocks)


@dataclass(frozen=True)
class ConfigurationSpace:
    """The configurations that a controller can select.

    Attributes:
        tiers: names, cheapest first, such as "low", "medium" and "high".
        num_blocks: transformer blocks of the model.
        min_active: minimum number of active blocks, including block 0.
        max_active: maximum number of active blocks.
        topk_choices: numbers of experts, ascending; the last one is that of the released model, and block 0 always
            uses it. Empty for a model without experts.
    """

    tiers: tuple[str, ...]
    num_blocks: int
    min_active: int
    max_active: int
    topk_choices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tiers:
            raise UserError("a configuration space needs at least one tier; set tier_sizes")
        if not 1 <= self.min_active <= self.max_active <= self.num_blocks:
            raise UserError(
                f"min_active={self.min_active} and max_active={self.max_active} must be between 1 and the model's "
                f"{self.num_blocks} blocks, and the first must not exceed the second"
            )
        require_ascending("topk_choices", self.topk_choices, may_be_empty=True)

    @property
    def full_topk(self) -> int:
        """Experts per token of the released model; 0 without experts."""
        return self.topk_choices[-1] if self.topk_choices else 0

    @property
    def full(self) -> Configuration:
        """The full model at its highest tier."""
        return self.configuration(len(self.tiers) - 1, [True] * self.num_blocks)

    def configuration(
        self, tier: int, blocks: Sequence[bool], topk: Sequence[int] | int | None = None
    ) -> Configuration:
        """Create a configuration in canonical form, so that equal configurations compare and hash as equal.

        Args:
            tier: index into `tiers`.
            blocks: whether each block runs.
            topk: experts per token of each block, one number for all blocks, or None for `full_topk`. Block 0 always
                has `full_topk`.

        Raises:
            ValueError: the number of blocks or the tier does not fit this space.
        """
        if len(blocks) != self.num_blocks or not blocks[0] or not 0 <= tier < len(self.tiers):
            raise ValueError(f"tier {tier} with blocks {list(map(int, blocks))} is not a configuration of {self}")
        active = tuple(map(bool, blocks))
        if not self.topk_choices:
            return Configuration(tier, active)
        requested = topk if isinstance(topk, Sequence) else [topk or self.full_topk] * self.num_blocks
        experts = [self.full_topk, *requested[1:]]
        return Configuration(tier, active, tuple(k if runs else 0 for k, runs in zip(experts, active, strict=True)))

    def sample(self, rng: random.Random) -> Configuration:
        """Sample a configuration, uniformly over tiers, numbers of blocks and numbers of experts."""
        num_others = rng.randint(self.min_active, self.max_active) - 1
        kept = rng.sample(range(1, self.num_blocks), num_others)
        blocks = [block == 0 or block in kept for block in range(self.num_blocks)]
        topk = [rng.choice(self.topk_choices or (0,)) for _ in range(self.num_blocks)]
        return self.configuration(rng.randrange(len(self.tiers)), blocks, topk)

    def complexity(self, configuration: Configuration) -> float:
        """Share of the model that runs, from 0 to 1: the mean of the shares of tier, blocks and experts.

        The tier's share is (tier + 1) / number of tiers. The blocks' share is active / all. The experts' share is the
        mean of k / full k over active blocks; a model without experts has only the first two.
        """
        shares = [(configuration.tier + 1) / len(self.tiers), configuration.num_active / self.num_blocks]
        if self.topk_choices:
            shares.append(sum(configuration.topk) / (self.full_topk * configuration.num_active))
        return sum(shares) / len(shares)

    def describe(self, configuration: Configuration) -> dict[str, Any]:
        """A configuration as plain values; `blocks` has a 1 for each active block and a 0 for each skipped block."""
        return {
            "tier": self.tiers[configuration.tier],
            "blocks": "".join(str(int(runs)) for runs in configuration.blocks),
            "topk": list(configuration.topk),
        }


def select_blocks(num_active: int, num_blocks: int, scores: Mapping[int, float] | None) -> list[bool]:
    """A mask of the blocks to keep: block 0 and the most important others, or the first blocks.

    Args:
        scores: importance by block index; None keeps the first blocks.
    """
    ranking = scores or {block: -block for block in range(num_blocks)}
    others = sorted(range(1, num_blocks), key=lambda block: -ranking[block])[: num_active - 1]
    return [block == 0 or block in others for block in range(num_blocks)]


def cheapest_configuration(space: ConfigurationSpace, scores: Mapping[int, float] | None) -> Configuration:
    """The configuration with the lowest tier and the fewest blocks and experts; for `scores`, see `select_blocks`."""
    blocks = select_blocks(space.min_active, space.num_blocks, scores)
    return space.configuration(0, blocks, space.topk_choices[0] if space.topk_choices else None)
