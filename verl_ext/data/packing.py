"""Which samples of a global batch share a forward pass, and on which rank: equal work for all, within a budget.

The window over which samples are arranged is the global batch: what a step learns from stays what it was.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Shares = list[list[list[int]]]
"""By rank, by micro-batch: numbers of samples."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Deals out the samples of a global batch; a pure function, so that every rank knows every share.

    Attributes:
        lengths: tokens of each sample of the data set (num_samples,).
        packs: whether the samples of a micro-batch lie behind each other in one row; else each has a row, padded to the
            longest.
        max_tokens: most tokens of a micro-batch, padding included; a longer sample has one of its own.
        max_samples: most samples of a micro-batch; None for as many as fit.
        quadratic: what attention adds to a sample's cost for each of its tokens, beside 1 for all else.
    """

    lengths: np.ndarray
    packs: bool
    max_tokens: int
    max_samples: int | None = None
    quadratic: float = 0.0

    def shares(self, rows: Sequence[int], num_ranks: int) -> Shares:
        """What each rank gets of `rows`: as many micro-batches as the others, if the ranks divide the rows."""
        lengths = self.lengths[np.asarray(rows)]
        bins = self._packed(lengths, num_ranks) if self.packs else self._padded(lengths, num_ranks)
        dealt = deal(bins, [self._cost(lengths, bin_) for bin_ in bins], num_ranks)
        return [[[rows[place] for place in bin_] for bin_ in share] for share in dealt]

    def _packed(self, lengths: np.ndarray, num_ranks: int) -> list[list[int]]:
        """As few micro-batches as hold the samples, filled evenly; samples over the budget have one each."""
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
        """Samples of like lengths together, in a multiple of the ranks' number of micro-batches."""
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
        """What a micro-batch takes, in tokens without attention."""
        of_bin = lengths[bin_]
        padded = of_bin if self.packs else np.full_like(of_bin, of_bin.max())
        return float((padded * (1 + self.quadratic * padded)).sum())


def attention_share(hidden_size: int) -> float:
    """`MicroBatchPlan.quadratic` of a transformer.

    A layer takes about 24 h^2 operations for a token forward, and 2 l h more for causal attention over l tokens (Kaplan
    et al. 2020, arXiv 2001.08361, table 1, halved for the mask), so l / (12 h) as much again.
    """
    return 1 / (12 * hidden_size)


def first_fit_decreasing(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of samples: each sample, the longest first, in the first bin that it fits in (Johnson 1973).

    Args:
        lengths: tokens of each sample (num_samples,).
        capacity: tokens of a bin; a longer sample has one of its own.
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
    """Bins of like cost: each sample, the costliest first, to the bin that has least (Graham 1969).

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


def deal(bins: list[list[int]], costs: Sequence[float], num_ranks: int) -> Shares:
    """Each rank's micro-batches, those that run at the same time of like cost.

    Longest first: a micro-batch that does not fit in memory fails at once, not after most of the step. The ranks take
    turns in having the costlier one.
    """
    order = sorted(range(len(bins)), key=lambda number: -costs[number])
    shares: Shares = [[] for _ in range(num_ranks)]
    for first in range(0, len(bins), num_ranks):
        at_once = order[first : first + num_ranks]
        ranks = range(num_ranks) if (first // num_ranks) % 2 == 0 else range(num_ranks - 1, -1, -1)
        for rank, number in zip(ranks, at_once):
            shares[rank].append(bins[number])
    return shares
