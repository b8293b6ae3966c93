"""Makes tensors of the samples that share a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from verl_ext.data.dataset import SampleDataset
from verl_ext.data.packing import MicroBatchPlan

Sample = dict[str, Any]
MicroBatch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """What one rank trains on in one step.

    Attributes:
        micro_batches: each with `input_ids`, `position_ids` and `loss_mask` of (batch, seq), and either
            `attention_mask` (batch, seq) or, where samples are packed into one row, their `sample_lengths`
            (num_samples,).
        rows: number of each sample in the data set.
    """

    micro_batches: list[MicroBatch]
    rows: list[int]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that count in the loss; the first of a sample has nothing to be predicted from."""
        return sum(int(micro_batch["loss_mask"][:, 1:].sum()) for micro_batch in self.micro_batches)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, without padding."""
        return [length for micro_batch in self.micro_batches for length in lengths_of(micro_batch)]


def lengths_of(micro_batch: MicroBatch) -> list[int]:
    """Tokens of each sample of a micro-batch, without padding."""
    if "sample_lengths" in micro_batch:
        return micro_batch["sample_lengths"].tolist()
    return micro_batch["attention_mask"].sum(-1).tolist()


class Batcher(Protocol):
    """Makes a rank's batch of a step, as the data loader's `collate_fn`, and single micro-batches."""

    def __call__(self, samples: Sequence[Any], /) -> Any: ...

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """The tensors of some samples."""


@dataclass(frozen=True)
class MicroBatcher:
    """Makes a rank's batch of a step; the data loader's `collate_fn`.

    Attributes:
        pad_token_id: fills `input_ids` behind a sample.
        packs: whether the samples of a micro-batch lie behind each other in one row.
    """

    pad_token_id: int
    packs: bool

    def __call__(self, groups: Sequence[Sequence[Sample]]) -> Batch:
        rows = [sample["row"] for group in groups for sample in group]
        return Batch([self.micro_batch(group) for group in groups], rows)

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """The tensors of some samples."""
        return pack(samples) if self.packs else pad(samples, self.pad_token_id)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Samples behind each other in one row: tensors of (1, tokens), and `sample_lengths` (num_samples,).

    Positions begin anew with each sample, and its first token is not learnt: nothing stands before it.
    """
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    loss_mask = torch.cat([sample["loss_mask"] for sample in samples])
    loss_mask[lengths.cumsum(0) - lengths] = 0
    return {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        "loss_mask": loss_mask[None],
        "sample_lengths": lengths,
    }


def pad(samples: Sequence[Sample], pad_token_id: int) -> MicroBatch:
    """Right-pad samples to the longest of them: tensors of (batch, seq)."""

    def stack(name: str, value: int) -> torch.Tensor:
        return pad_sequence([sample[name] for sample in samples], batch_first=True, padding_value=value)

    input_ids, lengths = stack("input_ids", pad_token_id), [len(sample["input_ids"]) for sample in samples]
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    attention_mask = (positions < torch.tensor(lengths)[:, None]).long()
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": positions * attention_mask,
        "loss_mask": stack("loss_mask", 0),
    }


class Groups(Dataset[list[Sample]]):
    """A data set that gives several samples at once, by a list of their numbers.

    Args:
        dataset: gives one by its number.
    """

    def __init__(self, dataset: SampleDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, rows: Sequence[int]) -> list[Sample]:
        return [self.dataset[row] for row in rows]


def validation_micro_batches(
    dataset: SampleDataset, plan: MicroBatchPlan, make: Callable[[list[Sample]], MicroBatch], rank: int, num_ranks: int
) -> Iterator[MicroBatch]:
    """This rank's share of the whole data set, no sample dropped, the same number of micro-batches on every rank.

    Ranks must run the same number of forward passes, since each gathers parameters from all; a rank that has run out
    gets the first sample again, without loss tokens.
    """
    shares = plan.shares(range(len(dataset)), num_ranks)
    for group in shares[rank]:
        yield make([dataset[row] for row in group])
    for _ in range(max(map(len, shares)) - len(shares[rank])):
        micro_batch = make([dataset[0]])
        yield {**micro_batch, "loss_mask": torch.zeros_like(micro_batch["loss_mask"])}


def sample_lengths(dataset: Any) -> np.ndarray:
    """Tokens of each sample (num_samples,)."""
    return np.asarray(dataset.lengths)
