"""Micro-batches: assigns the samples of a global batch to micro-batches and ranks, and builds the tensors.

Samples are only rearranged within a global batch, so packing does not change which samples a step trains on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from verl_ext.data.config import ChatDataConfig
from verl_ext.data.dataset import SampleDataset

T = TypeVar("T")
Sample = dict[str, Any]
MicroBatch = dict[str, torch.Tensor]
_END = object()
RankMicroBatches = list[list[list[int]]]
"""Sample indices of each micro-batch of each rank."""


# Which samples share a micro-batch


@dataclass(frozen=True)
class MicroBatchPlan:
    """Assigns the samples of a global batch deterministically, so every rank knows the assignment of all ranks.

    Attributes:
        lengths: number of tokens of each sample in the dataset (num_samples,).
        packs: whether the samples of a micro-batch are concatenated into one row; otherwise each sample is a row,
            padded to the longest.
        max_tokens: maximum tokens of a micro-batch, including padding; a longer sample gets its own micro-batch.
        max_samples: maximum samples of a micro-batch; None for as many as fit.
        quadratic: relative cost of attention: a sample of n tokens costs n * (1 + quadratic * n).
    """

    lengths: np.ndarray
    packs: bool
    max_tokens: int
    max_samples: int | None = None
    quadratic: float = 0.0

    def assign(self, rows: Sequence[int], num_ranks: int) -> RankMicroBatches:
        """Assign `rows` to micro-batches and ranks.

        All ranks get the same number of micro-batches if the number of ranks divides the number of rows.
        """
        lengths = self.lengths[np.asarray(rows)]
        bins = self._packed(lengths, num_ranks) if self.packs else self._padded(lengths, num_ranks)
        assigned = balance_ranks(bins, [self._cost(lengths, bin_) for bin_ in bins], num_ranks)
        return [[[rows[place] for place in bin_] for bin_ in of_rank] for of_rank in assigned]

    def _packed(self, lengths: np.ndarray, num_ranks: int) -> list[list[int]]:
        """The minimum number of micro-batches, filled evenly; a sample over `max_tokens` gets its own."""
        min_bins = len(first_fit_decreasing(lengths, self.max_tokens))
        alone = [[place] for place in np.flatnonzero(lengths > self.max_tokens).tolist()]
        fitting = np.flatnonzero(lengths <= self.max_tokens)
        costs = lengths[fitting] * (1 + self.quadratic * lengths[fitting])
        order = np.argsort(-costs, kind="stable")  # once, because sorted costs are filled faster
        fitting, costs = fitting[order], costs[order]
        for num_bins in range(-(-min_bins // num_ranks) * num_ranks, len(lengths), num_ranks):
            filled = fill_evenly(costs, num_bins - len(alone))
            if np.bincount(filled, weights=lengths[fitting]).max() <= self.max_tokens:
                bins: list[list[int]] = [[] for _ in range(num_bins - len(alone))]
                for place, number in zip(fitting.tolist(), filled.tolist()):
                    bins[number].append(place)
                return alone + bins
        return [[place] for place in range(len(lengths))]

    def _padded(self, lengths: np.ndarray, num_ranks: int) -> list[list[int]]:
        """Group samples of similar lengths; the number of micro-batches is a multiple of the number of ranks."""
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
        """Cost of a micro-batch in tokens, including attention."""
        of_bin = lengths[bin_]
        padded = of_bin if self.packs else np.full_like(of_bin, of_bin.max())
        return float((padded * (1 + self.quadratic * padded)).sum())


def plan_micro_batches(data: ChatDataConfig, lengths: np.ndarray, packs: bool, quadratic: float) -> MicroBatchPlan:
    """Return the plan of a configuration: up to `data.max_tokens_per_gpu` tokens, or a fixed number of samples."""
    max_tokens = data.max_tokens_per_gpu or (data.micro_batch_size_per_gpu * data.max_length if packs else sys.maxsize)
    max_samples = None if packs or data.max_tokens_per_gpu else data.micro_batch_size_per_gpu
    return MicroBatchPlan(lengths, packs, max_tokens, max_samples, quadratic)


def attention_share(hidden_size: int) -> float:
    """`MicroBatchPlan.quadratic` for a transformer.

    For each token, the forward pass of a layer takes about 24 h^2 FLOPs, plus 2 l h for causal attention over l
    tokens (Kaplan et al. 2020, arXiv 2001.08361, table 1, halved for the mask): attention adds l / (12 h).
    """
    return 1 / (12 * hidden_size)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Put each sample, longest first, into the first bin with enough space (Johnson 1973).

    Args:
        lengths: number of tokens of each sample (num_samples,).
        capacity: maximum tokens of a bin; a longer sample gets its own bin.
    """
    bins: list[list[int]] = []
    num_leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [capacity] * (2 * num_leaves)  # a binary tree: the space of a bin, or of the emptier of two nodes
    for place in np.argsort(-lengths, kind="stable").tolist():
        length, node = int(lengths[place]), 1
        if length > capacity:
            node = num_leaves + len(bins)
        while node < num_leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node == num_leaves + len(bins):
            bins.append([])
        bins[node - num_leaves].append(place)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def fill_evenly(costs: np.ndarray, num_bins: int) -> np.ndarray:
    """Fill bins evenly: put each sample, costliest first, into the bin with the lowest cost (Graham 1969).

    Args:
        costs: cost of each sample (num_samples,), with at least `num_bins` samples.
        num_bins: number of bins; no bin stays empty.

    Returns:
        Number of each sample's bin (num_samples,); among bins of equal cost, the lowest number comes first.
    """
    order = np.argsort(-costs, kind="stable")
    filled = np.empty(len(costs), dtype=np.int64)
    loads, bins = np.zeros(num_bins), np.arange(num_bins)  # in the order in which the bins are due
    start = 0
    while start < len(order):
        # Each sample goes to the next bin, until one of the bins just filled is due again.
        places = order[start : start + num_bins]
        grown = loads[: len(places)] + costs[places]
        is_due_again = loads[1 : len(places)] >= np.minimum.accumulate(grown)[:-1]
        size = int(is_due_again.argmax()) + 1 if is_due_again.any() else len(places)
        filled[places[:size]] = bins[:size]
        start += size
        end = max(size, int(np.searchsorted(loads, grown[:size].max(), side="right")))  # later bins stay in order
        loads[:size] = grown[:size]
        due = np.lexsort((bins[:end], loads[:end]))
        loads[:end], bins[:end] = loads[due], bins[due]
    return filled


def balance_ranks(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> RankMicroBatches:
    """Assign micro-batches to ranks so that concurrent micro-batches have similar cost.

    The costliest run first, so that a micro-batch that does not fit in memory fails at once, not at the end of the
    step. The ranks take turns in getting the costlier ones.
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
    """One rank's data for a step.

    Attributes:
        micro_batches: `input_ids`, `position_ids` and `loss_mask`, (batch, seq). Padded micro-batches also have
            `attention_mask` (batch, seq); packed micro-batches are a single row with `sample_lengths` (num_samples,).
        rows: index of each sample in the dataset.
    """

    micro_batches: list[MicroBatch]
    rows: list[int]

    @property
    def num_loss_tokens(self) -> int:
        """Number of tokens with loss; the first token of a sample has no prediction, so it does not count."""
        return sum(int(micro_batch["loss_mask"][:, 1:].sum()) for micro_batch in self.micro_batches)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sample, without padding."""
        return [length for micro_batch in self.micro_batches for length in lengths_of(micro_batch)]


def lengths_of(micro_batch: MicroBatch) -> list[int]:
    """Number of tokens of each sample in a micro-batch, without padding."""
    if "sample_lengths" in micro_batch:
        return micro_batch["sample_lengths"].tolist()
    return micro_batch["attention_mask"].sum(-1).tolist()


class Collator(Protocol):
    """Builds a rank's batch for a step, as the data loader's `collate_fn`, and single micro-batches."""

    def __call__(self, samples: Sequence[Any], /) -> Any: ...

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        """Build the tensors of samples that share a forward pass."""


@dataclass(frozen=True)
class MicroBatchCollator:
    """Builds the tensors of each micro-batch of a step.

    Attributes:
        pad_token_id: token that pads `input_ids`.
        packs: whether the samples of a micro-batch are concatenated into one row.
    """

    pad_token_id: int
    packs: bool

    def __call__(self, micro_batches: Sequence[Sequence[Sample]]) -> TokenBatch:
        rows = [sample["row"] for samples in micro_batches for sample in samples]
        return TokenBatch([self.micro_batch(samples) for samples in micro_batches], rows)

    def micro_batch(self, samples: Sequence[Sample]) -> MicroBatch:
        return pack(samples) if self.packs else pad(samples, self.pad_token_id)


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Concatenate samples into one row: tensors (1, tokens), and `sample_lengths` (num_samples,).

    Positions restart at each sample. The first token of a sample has no loss, because nothing predicts it.
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


class SampleLengths:
    """Lengths of the samples of a row, in tokens.

    Neither a list nor a dataclass: torch.compile would inspect them and recompile for each number of samples.
    """

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


def packed_arguments(sample_lengths: torch.Tensor, device: torch.device | str) -> dict[str, Any]:
    """Return forward-pass arguments that describe a packed row, for flash-attention and for `packed_sdpa`.

    Args:
        sample_lengths: (num_samples,), tokens per sample, on the CPU.
        device: device of the model.
    """
    borders = F.pad(sample_lengths.cumsum(0), (1, 0)).to(device, dtype=torch.int32, non_blocking=True)
    longest = int(sample_lengths.max())
    return {
        **{"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest},
        "sample_lengths": SampleLengths(sample_lengths.tolist()),
    }


def pad(samples: Sequence[Sample], pad_token_id: int) -> MicroBatch:
    """Right-pad samples to the longest one: tensors (batch, seq)."""

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
    dataset: SampleDataset, assigned: RankMicroBatches, make: Callable[[list[Sample]], MicroBatch], rank: int
) -> Iterator[MicroBatch]:
    """This rank's share of a whole dataset: no sample is dropped, and all ranks get the same number of micro-batches.

    Every forward pass gathers parameters from all ranks, so a rank that runs out of samples repeats the first sample
    without loss tokens.

    Args:
        assigned: result of `MicroBatchPlan.assign` for all samples.
        make: builds a micro-batch.
    """
    for rows in assigned[rank]:
        yield make([dataset[row] for row in rows])
    for _ in range(max(map(len, assigned)) - len(assigned[rank])):
        micro_batch = make([dataset[0]])
        yield {**micro_batch, "loss_mask": torch.zeros_like(micro_batch["loss_mask"])}


class Prefetcher(Generic[T]):
    """Prefetches one item in a thread, which suffices for samples in memory.

    Args:
        items: each iteration restarts it from the beginning.
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
