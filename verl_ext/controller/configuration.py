"""One configuration of a vision-language model, and the space of those that a controller may choose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.errors import UserError


@dataclass(frozen=True)
class Configuration:
    """How much of a model runs for one sample.

    Attributes:
        tier: place in the list of tiers, 0 for the fewest crops or pixels.
        blocks: of each transformer block, whether it runs; the first always does.
        topk: of each block, how many experts a token is routed to; 0 for a block that does not run, empty for a model
            without experts.
    """

    tier: int
    blocks: tuple[bool, ...]
    topk: tuple[int, ...] = ()

    @property
    def num_active(self) -> int:
        """How many blocks run."""
        return sum(self.blocks)


@dataclass(frozen=True)
class ConfigurationSpace:
    """What a controller chooses from.

    Attributes:
        tiers: names, from the cheapest; "low", "medium", "high" for instance.
        num_blocks: transformer blocks of the model.
        min_active: fewest blocks that run, block 0 among them.
        max_active: most blocks that run.
        topk_choices: numbers of experts, ascending; the last one is what the model was trained with, and what block 0
            always has. Empty for a model without experts.
    """

    tiers: tuple[str, ...]
    num_blocks: int
    min_active: int
    max_active: int
    topk_choices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tiers:
            raise UserError("the controller needs at least one tier; give their sizes in controller.tier_sizes")
        if not 1 <= self.min_active <= self.max_active <= self.num_blocks:
            raise UserError(
                f"controller.min_active={self.min_active} and controller.max_active={self.max_active} must lie between "
                f"1 and the model's {self.num_blocks} blocks, the first not above the second"
            )
        if list(self.topk_choices) != sorted(set(self.topk_choices)) or (
            self.topk_choices and self.topk_choices[0] < 1
        ):
            raise UserError(
                f"controller.topk_choices={list(self.topk_choices)} must be ascending numbers of experts from 1 on"
            )

    @property
    def full_topk(self) -> int:
        """Experts of a token as the model was trained; 0 without experts."""
        return self.topk_choices[-1] if self.topk_choices else 0

    @property
    def full(self) -> Configuration:
        """All of the model at its highest tier."""
        return self.configuration(len(self.tiers) - 1, [True] * self.num_blocks)

    def configuration(
        self, tier: int, blocks: Sequence[bool], topk: Sequence[int] | int | None = None
    ) -> Configuration:
        """A configuration in its one canonical form, so that equal ones compare and hash as equal.

        Args:
            tier: place in `tiers`.
            blocks: of each block, whether it runs.
            topk: experts of each block, one number for all, or None for what the model was trained with. Block 0 has
                `full_topk` whatever is said.

        Raises:
            ValueError: it has another number of blocks, or a tier that there is not.
        """
        if len(blocks) != self.num_blocks or not blocks[0] or not 0 <= tier < len(self.tiers):
            raise ValueError(f"tier {tier} with blocks {list(map(int, blocks))} is no configuration of {self}")
        if not self.topk_choices:
            return Configuration(tier, tuple(map(bool, blocks)))
        asked = topk if isinstance(topk, Sequence) else [topk or self.full_topk] * self.num_blocks
        each = [self.full_topk, *asked[1:]]
        return Configuration(
            tier, tuple(map(bool, blocks)), tuple(k if active else 0 for k, active in zip(each, blocks, strict=True))
        )

    def draw(self, rng: random.Random) -> Configuration:
        """One with every tier, every number of blocks and every number of experts as likely as the others."""
        others = rng.randint(self.min_active, self.max_active) - 1
        kept = rng.sample(range(1, self.num_blocks), others)
        blocks = [block == 0 or block in kept for block in range(self.num_blocks)]
        topk = [rng.choice(self.topk_choices or (0,)) for _ in range(self.num_blocks)]
        return self.configuration(rng.randrange(len(self.tiers)), blocks, topk)

    def complexity(self, configuration: Configuration) -> float:
        """Share of the model that runs, from 0 to 1: the mean of the shares of tiers, blocks and experts.

        A tier counts by its place, (tier + 1) / number of tiers. Blocks count as active / all. Experts count as the
        mean of k / full k over active blocks, and not at all in a model without experts.
        """
        shares = [(configuration.tier + 1) / len(self.tiers), configuration.num_active / self.num_blocks]
        if self.topk_choices:
            shares.append(sum(configuration.topk) / (self.full_topk * configuration.num_active))
        return sum(shares) / len(shares)
