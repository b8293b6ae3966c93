"""The order of the training data, and the data position that a checkpoint saves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler

from verl_ext.data.batching import MicroBatchPlan
from verl_ext.errors import UserError

VERL_ORDER_SEED = 0
"""Seed of the data order in verl's own SFT trainer, where `trainer.seed` does not affect the order."""
NEW_RUN = "start a new run with another trainer.experiment_name"


class GlobalBatchSampler(Sampler[list[Any]]):
    """Yields this rank's part of each global batch from the current position to the end of the epoch.

    A part is a list of sample indices, or with a plan a list of such lists, one for each micro-batch.

    The order depends on the seed and the epoch, not on the number of ranks, and the position counts the samples of all
    ranks. So one number resumes every rank exactly, even at the end of an epoch. The last incomplete batch of an epoch
    is dropped.

    Args:
        global_batch_size: samples per optimizer step over all data-parallel ranks.
        num_ranks: number of data-parallel ranks; must divide the global batch.
        plan: assigns the samples of a global batch to micro-batches and ranks; None gives each rank an equal,
            contiguous part of each mini-batch.
        num_mini_batches: number of updates per global batch; an update's samples do not depend on the number of ranks.

    Raises:
        UserError: the dataset is smaller than one global batch.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int,
        rank: int,
        num_ranks: int,
        seed: int,
        plan: MicroBatchPlan | None = None,
        num_mini_batches: int = 1,
    ) -> None:
        if num_samples < global_batch_size:
            raise UserError(
                f"the training set has {num_samples} samples, fewer than one global batch of {global_batch_size}; "
                f"set data.train_batch_size to {num_samples} or less"
            )
        self.num_samples, self.global_batch_size, self.seed = num_samples, global_batch_size, seed
        self.order_seed = seed
        self.rank, self.num_ranks, self.plan = rank, num_ranks, plan
        self.num_mini_batches = num_mini_batches
        self.epoch, self.batches_done = 0, 0

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return self.num_samples // self.global_batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        generator = torch.Generator().manual_seed(self.order_seed + self.epoch)
        order = torch.randperm(self.num_samples, generator=generator).tolist()
        for batch in range(self.batches_done, len(self)):
            first = batch * self.global_batch_size
            yield self._part_of_rank(order[first : first + self.global_batch_size])

    def _part_of_rank(self, rows: list[int]) -> list[Any]:
        if self.plan is not None:
            return self.plan.assign(rows, self.num_ranks)[self.rank]
        size = self.global_batch_size // self.num_mini_batches
        local_size = size // self.num_ranks
        starts = range(self.rank * local_size, self.global_batch_size, size)
        return [row for start in starts for row in rows[start : start + local_size]]

    def advance(self) -> None:
        """Advance by one global batch; after the last batch of an epoch, move to the start of the next epoch."""
        self.batches_done += 1
        if self.batches_done == len(self):
            self.epoch, self.batches_done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """The data position, which is equal on every rank."""
        samples_seen = self.batches_done * self.global_batch_size
        return {
            "epoch": self.epoch, "samples_seen": samples_seen, "num_samples": self.num_samples, "seed": self.seed,
            "order_seed": self.order_seed,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any], otherwise: str = NEW_RUN) -> None:
        """Restore a saved position.

        Args:
            state: see `state_dict`.
            otherwise: what to do instead of restoring the data or the seed, for messages.

        Raises:
            UserError: the size of the dataset or the seed differs, or the batch size does not divide the position.
        """
        seed = f"trainer.seed={state['seed']}"
        required = {
            "num_samples": (f"{state['num_samples']} training samples", "restore the training data"),
            "seed": (seed, f"set {seed}"),
        }
        for name, (saved, fix) in required.items():
            if state[name] != getattr(self, name):
                raise UserError(
                    f"the checkpoint was saved with {saved}, but this run has {getattr(self, name)}, so the data order "
                    f"would change; {fix}, or {otherwise}"
                )
        if state["samples_seen"] % self.global_batch_size:
            raise UserError(
                f"the checkpoint is {state['samples_seen']} samples into its epoch, which is not a multiple of "
                f"data.train_batch_size={self.global_batch_size}; resume with the previous batch size"
            )
        self.order_seed = state.get("order_seed", self.seed)  # differs if verl itself started the run
        self.epoch, self.batches_done = state["epoch"], state["samples_seen"] // self.global_batch_size
        if self.batches_done >= len(self):
            self.epoch, self.batches_done = self.epoch + 1, 0

    def state_after_verl(
        self, loader_state: dict[str, Any], step: int, num_saved_ranks: int
    ) -> tuple[dict[str, Any], str | None]:
        """The state with which this sampler continues a run of verl's own SFT trainer at the next sample.

        verl shuffles with `DistributedSampler`: epoch e is `randperm` with the seed 0 + e, and rank r of n takes every
        n-th sample, starting at the r-th. The k-th samples of all ranks are adjacent in that order, so verl's k-th
        global batch is the k-th contiguous block of samples on any number of ranks. This sampler yields the same
        batches for that seed. Both drop the last incomplete batch.

        Args:
            loader_state: content of `data.pt`, the state of rank 0's `StatefulDataLoader`; empty if there is none.
            step: number of completed optimizer steps.
            num_saved_ranks: number of data-parallel ranks that saved the checkpoint.

        Returns:
            A state for `load_state_dict`, and a warning if verl may have been at another position, otherwise None.
        """
        doubt = None
        seen = _batches_seen(loader_state, num_saved_ranks)
        batches, batch_size = seen or (step, self.global_batch_size)
        steps_per_epoch = max(self.num_samples // batch_size, 1)
        epoch, by_step = divmod(step, steps_per_epoch)
        if seen is not None and batches != by_step and (batches, by_step) != (steps_per_epoch, 0):
            epoch, by_step = divmod(step, len(self))
            doubt = (
                f"its data.pt is {batches} batches of {batch_size} samples into an epoch, which contradicts step "
                f"{step} with {self.num_samples} samples, so the data and its order have changed; the run resumes "
                f"{by_step} batches into epoch {epoch}"
            )
            batch_size = self.global_batch_size
        position = {"epoch": epoch, "samples_seen": by_step * batch_size}
        return {**self.state_dict(), **position, "order_seed": VERL_ORDER_SEED}, doubt


def _batches_seen(loader_state: dict[str, Any], num_ranks: int) -> tuple[int, int] | None:
    """Number of completed batches in the epoch, and their size over all ranks; None if the state lacks them."""
    try:
        main = loader_state["_snapshot"]["_main_snapshot"]
        batches, samples = main["_sampler_iter_yielded"], main["_sampler_iter_state"]["samples_yielded"]
    except (KeyError, TypeError):  # no state, or a state of another torchdata version
        return None
    return (batches, samples // batches * num_ranks) if batches and samples else None
