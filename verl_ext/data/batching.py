"""Tensors of the samples that share a forward pass, made one batch ahead of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from verl_ext.data.dataset import SampleDataset
from verl_ext.data.packing import MicroBatchPlan

T = TypeVar("T")
Sample = dict[str, Any]
MicroBatch = dict[str, torch.Tensor]
_END = object()


@dataclass(frozen=True)
class TokenBatch:
    """What one rank trains on in one step.

    Attributes:
        micro_batches: each has `input_ids`, `position_ids` and `loss_mask`, (batch, seq). Padded ones also have
            `attention_mask` (batch, seq); packed ones are a single row with `sample_lengths` (num_samples,).
        rows: number of each sample in the data set.
    """

    micro_batches: list[MicroBatch]
    rows: list[int]

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the loss is computed on; the first token of a sample has no prediction."""
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


class Collator(Protocol):
    """Makes a rank's batch of a step, as the data loader's `collate_fn`, and single micro-batches."""

    def __call__(self, samples: Sequence[Any], /) -> Any: ...

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """The tensors of samples that share a forward pass."""


@dataclass(frozen=True)
class MicroBatchCollator:
    """Makes the tensors of each micro-batch of a step.

    Attributes:
        pad_token_id: fills `input_ids` after the end of a sample.
        packs: whether the samples of a micro-batch are concatenated into one row.
    """

    pad_token_id: int
    packs: bool

    def __call__(self, micro_batches: Sequence[Sequence[Sample]]) -> TokenBatch:
        rows = [sample["row"] for samples in micro_batches for sample in samples]
        return TokenBatch([self.micro_batch(samples) for samples in micro_batches], rows)

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """See `Collator`."""
        return pack(samples) if self.packs else pad(samples, self.pad_token_id)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Concatenate samples into one row: tensors of (1, tokens), and `sample_lengths` (num_samples,).

    Positions restart at each sample. Its first token has no loss, because nothing in the sample predicts it.
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


def validation_micro_batches(
    dataset: SampleDataset,
    plan: MicroBatchPlan,
    make: Callable[[list[Sample]], MicroBatch],
    rank: int,
    num_ranks: int,
) -> Iterator[MicroBatch]:
    """This rank's share of a whole data set; no sample is dropped, and every rank gets as many micro-batches.

    Every forward pass gathers parameters from all ranks, so a rank that runs out repeats the first sample without loss
    tokens.
    """
    assigned = plan.assign(range(len(dataset)), num_ranks)
    for rows in assigned[rank]:
        yield make([dataset[row] for row in rows])
    for _ in range(max(map(len, assigned)) - len(assigned[rank])):
        micro_batch = make([dataset[0]])
        yield {**micro_batch, "loss_mask": torch.zeros_like(micro_batch["loss_mask"])}


class Prefetcher(Generic[T]):
    """Iterates one item ahead in a thread, which suffices for samples that are in memory.

    Args:
        items: iterated from its start by each iteration.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[T]:
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
            source = iter(self._items)
            coming = thread.submit(next, source, _END)
            while (item := coming.result()) is not _END:
                coming = thread.submit(next, source, _END)
                yield cast("T", item)
