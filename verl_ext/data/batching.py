"""Micro-batches: which samples of a global batch share one, on which rank, and their tensors.

Samples are only rearranged within a global batch, so packing does not change what a step learns from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl_ext.data.dataset import SampleDataset

T = TypeVar("T")
Sample = dict[str, Any]
MicroBatch = dict[str, torch.Tensor]
_END = object()
RankMicroBatches = list[list[list[int]]]
"""By rank, by micro-batch: numbers of samples."""


# Which samples share a micro-batch


@dataclass(frozen=True)
class MicroBatchPlan:
    """Assigns the samples of a global batch; a pure function, so every rank knows the assignment of all ranks.

    Attributes:
        lengths: tokens of each sample of the data set (num_samples,).
        packs: whether the samples of a micro-batch are concatenated into one row; otherwise each has a row, padded to
            the longest.
        max_tokens: maximum tokens of a micro-batch, including padding; a longer sample gets its own micro-batch.
        max_samples: maximum samples of a micro-batch; None for as many as fit.
        quadratic: cost of attention: a sample of n tokens costs n * (1 + quadratic * n).
    """

    lengths: np.ndarray
    packs: bool
    max_tokens: int
    max_samples: int | None = None
    quadratic: float = 0.0

    def assign(self, rows: Sequence[int], num_ranks: int) -> RankMicroBatches:
        """Micro-batches of `rows` for each rank; the same number for all if the ranks divide the rows."""
        lengths = self.lengths[np.asarray(rows)]
        bins = self._packed(lengths, num_ranks) if self.packs else self._padded(lengths, num_ranks)
        assigned = balance_ranks(bins, [self._cost(lengths, bin_) for bin_ in bins], num_ranks)
        return [[[rows[place] for place in bin_] for bin_ in of_rank] for of_rank in assigned]

    def _packed(self, lengths: np.ndarray, num_ranks: int) -> list[list[int]]:
        """As few micro-batches as hold the samples, filled evenly; each sample over the budget has its own."""
        fewest = len(first_fit_decreasing(lengths, self.max_tokens))
        fitting = np.flatnonzero(lengths <= self.max_tokens)
        alone = [[place] for place in np.flatnonzero(lengths > self.max_tokens).tolist()]
        costs = lengths[fitting] * (1 + self.quadratic * lengths[fitting])
        for num_bins in range(-(-fewest // num_ranks) * num_ranks, len(lengths), num_ranks):
            bins = [fitting[bin_].tolist() for bin_ in fill_evenly(costs, num_bins - len(alone))]
            if max(int(lengths[bin_].sum()) for bin_ in bins) <= self.max_tokens:
                return alone + bins
        return [[place] for place in range(len(lengths))]

    def _padded(self, lengths: np.ndarray, num_ranks: int) -> list[list[int]]:
        """Samples of similar lengths together; the number of micro-batches is a multiple of the ranks'."""
        bins: list[list[int]] = []
        for place in np.argsort(-lengths, kind="stable").tolist():
            size = len(bins[-1]) if bins else 0
            if not bins or size == self.max_samples or (size + 1) * int(lengths[bins[-1][0]]) > self.max_tokens:
                bins.append([])
            bins[-1].append(place)
        while len(bins) % num_ranks and len(bins) < len(lengths):
            costliest = max((bin_ for bin_ in bins if len(bin_) > 1), key=lambda bin_: self._cost(lengths, bin_))
            bins.remove(costliest)
            bins += [costliest[: len(costliest) // 2], costliest[len(costliest) // 2 :]]
        return bins

    def _cost(self, lengths: np.ndarray, bin_: list[int]) -> float:
        """Cost of a micro-batch in tokens, attention included."""
        of_bin = lengths[bin_]
        padded = of_bin if self.packs else np.full_like(of_bin, of_bin.max())
        return float((padded * (1 + self.quadratic * padded)).sum())


def attention_share(hidden_size: int) -> float:
    """`MicroBatchPlan.quadratic` of a transformer.

    For each token, a layer takes about 24 h^2 operations in the forward pass, plus 2 l h for causal attention over l
    tokens (Kaplan et al. 2020, arXiv 2001.08361, table 1, halved for the mask): attention adds l / (12 h).
    """
    return 1 / (12 * hidden_size)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of samples: each sample, the longest first, in the first bin that it fits in (Johnson 1973).

    Args:
        lengths: tokens of each sample (num_samples,).
        capacity: tokens of a bin; a longer sample gets its own bin.
    """
    bins: list[list[int]] = []
    room = np.empty(len(lengths), dtype=np.int64)
    for place in np.argsort(-lengths, kind="stable").tolist():
        fitting = np.flatnonzero(room[: len(bins)] >= lengths[place])
        if len(fitting):
            bins[fitting[0]].append(place)
            room[fitting[0]] -= lengths[place]
        else:
            room[len(bins)] = capacity - lengths[place]
            bins.append([place])
    return bins


def fill_evenly(costs: np.ndarray, num_bins: int) -> list[list[int]]:
    """Bins of similar cost: each sample, the costliest first, in the bin that has least (Graham 1969).

    Args:
        costs: of each sample (num_samples,), at least `num_bins` of them.
        num_bins: none of which stays empty.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    least = [(0.0, number) for number in range(num_bins)]
    for place in np.argsort(-costs, kind="stable").tolist():
        filled, number = heapq.heappop(least)
        bins[number].append(place)
        heapq.heappush(least, (filled + float(costs[place]), number))
    return bins


def balance_ranks(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> RankMicroBatches:
    """Micro-batches of each rank, so that those that run at the same time have similar cost.

    The costliest run first: a micro-batch that does not fit in memory fails at once, not at the end of the step. The
    ranks take turns at the costlier ones.
    """
    order = sorted(range(len(bins)), key=lambda number: -costs[number])
    assigned: RankMicroBatches = [[] for _ in range(num_ranks)]
    for first in range(0, len(bins), num_ranks):
        at_once = order[first : first + num_ranks]
        ranks = range(num_ranks) if (first // num_ranks) % 2 == 0 else range(num_ranks - 1, -1, -1)
        for rank, number in zip(ranks, at_once):
            assigned[rank].append(bins[number])
    return assigned


# Tensors


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
    dataset: SampleDataset, plan: MicroBatchPlan, make: Callable[[list[Sample]], MicroBatch], rank: int, num_ranks: int
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
