"""Where a run of verl's own SFT trainer stood in its data, so that this pipeline goes on with the next sample.

verl shuffles with `DistributedSampler`: epoch e is `randperm` with the seed 0 + e, dealt to the ranks in turn. The k-th
samples of all ranks are neighbours in that order, so its k-th global batch is the k-th run of samples, on any number of
ranks: what `GlobalBatchSampler` yields for that seed. Both leave out the last incomplete batch.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_ext.console import print_line, warn
from verl_ext.errors import UserError

VERLS_SEED = 0
"""Of the order of the data; verl's `trainer.seed` has no effect on it."""


@dataclass(frozen=True)
class StockPosition:
    """A position in verl's order of the data.

    Attributes:
        epoch: passes done.
        samples_seen: of this epoch, over all ranks.
        doubt: why this may not be where verl stood, None where it surely is.
    """

    epoch: int
    samples_seen: int
    doubt: str | None = None


def stock_position(
    loader_state: dict[str, Any], step: int, num_samples: int, global_batch_size: int, num_saved_ranks: int
) -> StockPosition:
    """Translate what verl saved with a checkpoint.

    Args:
        loader_state: `data.pt`: the state of rank 0's `StatefulDataLoader`; empty where there is none.
        step: optimizer steps done.
        num_samples: of the data set.
        global_batch_size: of this run.
        num_saved_ranks: data-parallel ranks that the checkpoint was saved by.
    """
    seen = _seen(loader_state, num_saved_ranks)
    batches, batch_size = seen or (step, global_batch_size)
    steps_per_epoch = max(num_samples // batch_size, 1)
    epoch, by_step = divmod(step, steps_per_epoch)
    if seen is None or batches == by_step or (batches == steps_per_epoch and by_step == 0):
        return StockPosition(epoch, by_step * batch_size)
    epoch, by_step = divmod(step, max(num_samples // global_batch_size, 1))
    doubt = (
        f"its data.pt lies {batches} batches of {batch_size} samples into an epoch, which step {step} does not on "
        f"{num_samples} samples; the order of other data is another, so it goes on {by_step} batches into epoch {epoch}"
    )
    return StockPosition(epoch, by_step * global_batch_size, doubt)


def _seen(loader_state: dict[str, Any], num_ranks: int) -> tuple[int, int] | None:
    """Batches that were trained on in the epoch, and their size over all ranks; None where it is not said."""
    try:
        main = loader_state["_snapshot"]["_main_snapshot"]
        batches, samples = main["_sampler_iter_yielded"], main["_sampler_iter_state"]["samples_yielded"]
    except (KeyError, TypeError):  # there is no state, or that of another version of torchdata
        return None
    return (batches, samples // batches * num_ranks) if batches and samples else None


def data_state_after_verl(
    checkpoint: Path,
    loader_state: dict[str, Any],
    *,
    step: int,
    num_samples: int,
    global_batch_size: int,
    num_saved_ranks: int,
    seed: int,
    show: bool,
) -> dict[str, Any]:
    """The position in the data of a checkpoint that verl wrote, in the form that this pipeline saves.

    Args:
        checkpoint: a `global_step_N`.
        loader_state: its `data.pt`; empty if it has none.
        step: optimizer steps done.
        num_samples: of the data set.
        global_batch_size: of this run.
        num_saved_ranks: data-parallel ranks that the checkpoint was saved by.
        seed: of this run.
        show: whether this rank prints where the run continues.

    Raises:
        UserError: this pipeline wrote the checkpoint, but its manifest and export plan are lost.
    """
    if "samples_seen" in loader_state:
        raise UserError(f"{checkpoint} lost its manifest.json; restore it, or name another checkpoint to resume from")
    position = stock_position(loader_state, step, num_samples, global_batch_size, num_saved_ranks)
    if show:
        print_line(
            f"verl itself wrote {checkpoint.name}; this run continues in verl's order of the data, "
            f"{position.samples_seen} of {num_samples} samples into epoch {position.epoch}, and removes none of verl's "
            "checkpoints",
            sys.__stdout__,
        )
        if position.doubt is not None:
            warn(f"{checkpoint.name}: {position.doubt}")
    return {
        "epoch": position.epoch,
        "samples_seen": position.samples_seen,
        "num_samples": num_samples,
        "seed": seed,
        "order_seed": VERLS_SEED,
    }
