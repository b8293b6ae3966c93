"""Ranks that hold one engine's weights together: what one is to draw, all of them draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from verl_ext.grpo.rollout.completion import Draw


@dataclass(frozen=True)
class Team:
    """The ranks of one engine.

    Attributes:
        group: of torch; None for a rank that has an engine of its own.
    """

    group: dist.ProcessGroup | None = None

    @staticmethod
    def of(size: int) -> Team:
        """This rank's team, ranks that follow one another, as vLLM's external launcher groups them; collective."""
        if size == 1:
            return Team()
        group, _ = dist.new_subgroups(size)
        return Team(group)

    def together(self, draws: Sequence[Draw]) -> tuple[list[Draw], range]:
        """The draws of all ranks of the team in the order of the ranks, and which of them are this rank's."""
        if self.group is None:
            return list(draws), range(len(draws))
        everyone: list[list[Draw]] = [[] for _ in range(self.group.size())]
        dist.all_gather_object(everyone, list(draws), group=self.group)
        start = sum(map(len, everyone[: self.group.rank()]))
        return [draw for share in everyone for draw in share], range(start, start + len(draws))
