"""The order of the training data, as a function of the seed, the epoch and the samples already seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from verl_ext.data.packing import MicroBatchPlan
from verl_ext.errors import UserError


class GlobalBatchSampler(Sampler[list[Any]]):
    """Yields this rank's part of each global batch from the current position to the end of the epoch.

    A part is a list of samples' numbers, or with a plan a list of such lists, one for each micro-batch.

    The order does not depend on the number of ranks, and the position is a count of samples of the whole job, so one
    number resumes every rank exactly, also at the very end of an epoch. The last incomplete batch is left out.

    Args:
        num_samples: size of the data set.
        global_batch_size: samples per optimizer step over all data-parallel ranks.
        rank: this data-parallel rank.
        num_ranks: number of data-parallel ranks; it divides the global batch.
        seed: `trainer.seed`.
        plan: which samples share a micro-batch, and on which rank; None gives each rank an equal run of them.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        rank: int,
        num_ranks: int,
        seed: int,
        plan: MicroBatchPlan | None = None,
    ) -> None:
        if num_samples < global_batch_size:
            raise UserError(
                f"the training set has {num_samples} samples, fewer than one global batch of {global_batch_size}; "
                f"set data.train_batch_size to {num_samples} or less"
            )
        self.num_samples, self.global_batch_size, self.seed = num_samples, global_batch_size, seed
        self.order_seed = seed
        self.rank, self.num_ranks, self.plan = rank, num_ranks, plan
        self.epoch, self.batches_done = 0, 0

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self.num_samples // self.global_batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        generator = torch.Generator().manual_seed(self.order_seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator).tolist()
        for batch in range(self.batches_done, len(self)):
            first = batch * self.global_batch_size
            yield self._share(order[first : first + self.global_batch_size])

    def _share(self, rows: list[int]) -> list[Any]:
        """What this rank gets of a global batch."""
        if self.plan is not None:
            return self.plan.shares(rows, self.num_ranks)[self.rank]
        local_batch_size = self.global_batch_size // self.num_ranks
        return rows[self.rank * local_batch_size :][:local_batch_size]

    def advance(self) -> None:
        """Count one global batch as trained on; the last of an epoch moves to the start of the next."""
        self.batches_done += 1
        if self.batches_done == len(self):
            self.epoch, self.batches_done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, the same on every rank."""
        samples_seen = self.batches_done * self.global_batch_size
        return {
            "epoch": self.epoch, "samples_seen": samples_seen, "num_samples": self.num_samples, "seed": self.seed,
            "order_seed": self.order_seed,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            UserError: the data set or the seed is another, or the batch size does not divide what was seen.
        """
        for name in ("num_samples", "seed"):
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the checkpoint was written with {name}={state[name]}, this run has {getattr(self, name)}, so "
                    "the order of the data cannot go on; restore it, or start anew with another trainer.experiment_name"
                )
        if state["samples_seen"] % self.global_batch_size:
            raise UserError(
                f"the checkpoint lies {state['samples_seen']} samples into its epoch, which is no multiple of "
                f"data.train_batch_size={self.global_batch_size}; resume with the former batch size"
            )
        self.order_seed = state.get("order_seed", self.seed)  # another where the run was begun by verl itself
        self.epoch, self.batches_done = state["epoch"], state["samples_seen"] // self.global_batch_size
        if self.batches_done >= len(self):
            self.epoch, self.batches_done = self.epoch + 1, 0
