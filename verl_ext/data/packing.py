"""Which samples of a global batch share a forward pass, and on which rank: equal work for all within a token budget.

Samples are only rearranged within a global batch, so packing does not change what a step learns from.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RankMicroBatches = list[list[list[int]]]
"""By rank, by micro-batch: numbers of samples."""


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
            if not bins or self._is_full(bins[-1], int(lengths[bins[-1][0]])):
                bins.append([])
            bins[-1].append(place)
        while len(bins) % num_ranks and len(bins) < len(lengths):
            costliest = max((bin_ for bin_ in bins if len(bin_) > 1), key=lambda bin_: self._cost(lengths, bin_))
            bins.remove(costliest)
            bins += [costliest[: len(costliest) // 2], costliest[len(costliest) // 2 :]]
        return bins

    def _is_full(self, bin_: list[int], longest: int) -> bool:
        return len(bin_) == self.max_samples or (len(bin_) + 1) * longest > self.max_tokens

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
