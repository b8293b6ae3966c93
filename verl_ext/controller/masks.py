"""The distribution over block masks: Bernoulli draws on condition that an allowed number of blocks runs."""

from __future__ import annotations

from functools import cached_property

import torch

IMPOSSIBLE = -1e30  # log of a probability of zero that stays a number when it is subtracted from itself


class BlockMasks:
    """P(mask) = exp(sum of the logits of its blocks) / Z over all masks with `fewest` to `most` blocks; exact.

    This is the conditional Bernoulli distribution (Chen, Dempster and Liu, "Weighted finite population sampling to
    maximize entropy", Biometrika 81, 1994), with a range of sizes in place of one. `Z` and all that follows come from
    one table over (block, number of blocks chosen before it), in O(blocks * most) for a batch. The tables are double
    precision whatever the logits are.

    Args:
        logits: (batch, blocks), of the blocks that may be left out; block 0 of the model is not among them.
        fewest: least number of these blocks that run.
        most: greatest number of them.
    """

    def __init__(self, logits: torch.Tensor, fewest: int, most: int) -> None:
        self.num_blocks = logits.shape[1]
        if not 0 <= fewest <= most <= self.num_blocks:
            raise ValueError(f"{fewest} to {most} of {self.num_blocks} blocks cannot run")
        self.logits, self.fewest, self.most = logits.double(), fewest, most

    @cached_property  # the mode, which a deployed controller takes, needs none of it
    def _tables(self) -> list[torch.Tensor]:
        """[i][:, c]: log of the sum over the blocks from i on, once c before them run; the last column is a wall."""
        end = self.logits.new_full((len(self.logits), self.most + 2), IMPOSSIBLE)
        end[:, self.fewest : self.most + 1] = 0.0
        tables = [end]
        for i in reversed(range(self.num_blocks)):
            chosen = self.logits[:, i, None] + tables[0][:, 1:]
            table = torch.logaddexp(tables[0][:, :-1], chosen)
            tables.insert(0, torch.cat([table, end[:, -1:]], dim=1))
        return tables

    @property
    def log_normalizer(self) -> torch.Tensor:
        """log Z, (batch,)."""
        return self._tables[0][:, 0]

    def log_prob(self, masks: torch.Tensor) -> torch.Tensor:
        """Log-probability of each mask, (batch,), in the precision of the tables.

        Args:
            masks: (batch, blocks), bool; each must have an allowed number of blocks.
        """
        return (self.logits * masks).sum(-1) - self.log_normalizer

    def _log_odds_parts(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities of running and of leaving out block i, by the number of blocks chosen before it.

        Returns:
            Two tensors (batch, most + 1).
        """
        here, after = self._tables[i][:, :-1], self._tables[i + 1]
        reachable = here > IMPOSSIBLE / 2
        run = torch.where(reachable, self.logits[:, i, None] + after[:, 1:] - here, IMPOSSIBLE)
        leave = torch.where(reachable, after[:, :-1] - here, IMPOSSIBLE)
        return run, leave

    def sample_by(self, uniform: torch.Tensor) -> torch.Tensor:
        """The mask that random numbers in [0, 1) give, (batch, blocks) bool, block by block with exact probabilities.

        Args:
            uniform: (batch, blocks), one number for each decision.
        """
        chosen = torch.zeros(len(self.logits), dtype=torch.long, device=self.logits.device)
        draws = []
        for i in range(self.num_blocks):
            run = self._log_odds_parts(i)[0].gather(1, chosen[:, None])[:, 0]
            draws.append(uniform[:, i] < run.exp())
            chosen = chosen + draws[-1].long()
        return torch.stack(draws, dim=1) if draws else torch.zeros_like(uniform, dtype=torch.bool)

    def mode(self) -> torch.Tensor:
        """The likeliest mask of each row, (batch, blocks) bool: its blocks with the greatest logits."""
        ranks = self.logits.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        count = (self.logits > 0).sum(1).clamp(self.fewest, self.most)
        return ranks < count[:, None]

    def detached(self) -> BlockMasks:
        """The same distribution without a gradient."""
        return BlockMasks(self.logits.detach(), self.fewest, self.most)

    def entropy(self, of_active: torch.Tensor | None = None) -> torch.Tensor:
        """Entropy in nats, (batch,), with gradient.

        Args:
            of_active: (batch, blocks), entropy of what else is drawn for a block where it runs.
        """
        extra = torch.zeros_like(self.logits) if of_active is None else of_active.double()
        expected = torch.zeros_like(self._tables[-1][:, :-1])
        for i in reversed(range(self.num_blocks)):
            run, leave = self._log_odds_parts(i)
            after = torch.cat([expected[:, 1:], torch.zeros_like(expected[:, :1])], dim=1)
            value_run, value_leave = extra[:, i, None] + after - run, expected - leave
            expected = run.exp() * value_run + leave.exp() * value_leave
        return expected[:, 0]
