"""Assignment of samples to micro-batches: every sample once, within the token budget, and balanced over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from verl_ext.data.batching import MicroBatchPlan, RankMicroBatches, attention_share, fill_evenly, first_fit_decreasing


def lengths_like_code(number: int, seed: int = 0) -> np.ndarray:
    """Long-tailed lengths up to 1024."""
    return np.clip(np.random.default_rng(seed).lognormal(5, 1, number), 8, 1024).astype(np.int64)


def tokens_of(lengths: np.ndarray, shares: RankMicroBatches) -> np.ndarray:
    """Tokens by rank and micro-batch (ranks, micro_batches)."""
    return np.array([[lengths[group].sum() for group in share] for share in shares])


def all_rows(shares: RankMicroBatches) -> list[int]:
    return sorted(row for share in shares for group in share for row in group)


def test_first_fit_decreasing_fills_bins_by_length() -> None:
    assert first_fit_decreasing(np.array([4, 8, 1, 4, 2, 1]), 10) == [[1, 4], [0, 3, 2, 5]]
    assert first_fit_decreasing(np.array([12, 3]), 10) == [[0], [1]]  # too long for any bin: alone


def test_first_fit_decreasing_is_near_optimal() -> None:
    lengths = lengths_like_code(2000)
    bins = first_fit_decreasing(lengths, 2048)
    assert sorted(sum(bins, [])) == list(range(2000))
    assert max(lengths[bin_].sum() for bin_ in bins) <= 2048
    assert len(bins) <= 1.01 * lengths.sum() / 2048 + 1


def test_fill_evenly_leaves_no_bin_empty() -> None:
    assert sorted(fill_evenly(np.array([100.0, 1.0, 1.0, 1.0]), 4)) == [0, 1, 2, 3]


def some_lengths(rng: np.random.Generator) -> np.ndarray:
    """Random lengths, often with ties."""
    number, longest = int(rng.integers(1, 200)), int(rng.choice([1, 3, 50, 1000]))
    lengths = rng.integers(0, longest + 1, number), np.full(number, longest), lengths_like_code(number)
    return lengths[rng.integers(len(lengths))]


def test_first_fit_decreasing_equals_linear_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths, capacity = some_lengths(rng), int(rng.choice([1, 10, 100, 3000]))
        bins: list[list[int]] = []
        for place in np.argsort(-lengths, kind="stable").tolist():
            rooms = [capacity - lengths[bin_].sum() for bin_ in bins]
            number = next((n for n, room in enumerate(rooms) if room >= lengths[place]), len(bins))
            bins += [[]] if number == len(bins) else []
            bins[number].append(place)
        assert first_fit_decreasing(lengths, capacity) == bins


def test_fill_evenly_equals_one_sample_at_a_time() -> None:
    """The order of ties counts: another plan would change the losses of a resumed run."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        lengths = some_lengths(rng)
        costs = lengths * (1 + rng.choice([0, attention_share(64)]) * lengths)
        num_bins = int(rng.integers(1, len(lengths) + 1))
        loads, filled = [0.0] * num_bins, np.zeros(len(lengths), int)
        for place in np.argsort(-costs, kind="stable").tolist():
            filled[place] = loads.index(min(loads))
            loads[filled[place]] += float(costs[place])
        assert fill_evenly(costs, num_bins).tolist() == filled.tolist()


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
@pytest.mark.parametrize("budget", [1024, 2048, 8192])
def test_packed_shares_keep_budget_and_balance_ranks(num_ranks: int, budget: int) -> None:
    lengths = lengths_like_code(4000)
    plan = MicroBatchPlan(lengths, packs=True, max_tokens=budget)
    rows = np.random.default_rng(1).permutation(4000)[:256].tolist()
    shares = plan.assign(rows, num_ranks)
    assert all_rows(shares) == sorted(rows)
    assert len({len(share) for share in shares}) == 1
    tokens = tokens_of(lengths, shares)
    assert tokens.max() <= budget
    at_once = tokens.max(axis=0).sum() / tokens.mean(axis=0).sum()  # time of the slowest rank relative to the mean
    assert at_once < 1.03
    fewest = -(-lengths[rows].sum() // budget)
    assert tokens.size <= -(-fewest // num_ranks) * num_ranks + num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_padded_shares_group_similar_lengths(num_ranks: int) -> None:
    lengths = lengths_like_code(512)
    rows: Sequence[int] = range(512)
    of_size = MicroBatchPlan(lengths, packs=False, max_tokens=1 << 40, max_samples=8).assign(rows, num_ranks)
    assert all_rows(of_size) == list(rows)
    assert {len(group) for share in of_size for group in share} == {8}
    padded = sum(lengths[group].max() * len(group) for share in of_size for group in share)
    assert padded < 1.1 * lengths.sum()
    of_tokens = MicroBatchPlan(lengths, packs=False, max_tokens=4096).assign(rows, num_ranks)
    assert all_rows(of_tokens) == list(rows)
    assert len({len(share) for share in of_tokens}) == 1
    assert max(lengths[group].max() * len(group) for share in of_tokens for group in share) <= 4096


def test_samples_longer_than_budget_are_alone() -> None:
    for packs in (True, False):
        plan = MicroBatchPlan(np.array([50, 60, 70, 80]), packs, max_tokens=10)
        assert plan.assign(range(4), 2) == [[[3], [0]], [[2], [1]]]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("long", [[1200], [1001, 3000, 1200]])
def test_samples_longer_than_budget_leave_others_packed(long: list[int], num_ranks: int) -> None:
    lengths = np.array([*long, *([10] * (128 - len(long)))])
    shares = MicroBatchPlan(lengths, packs=True, max_tokens=1000).assign(range(128), num_ranks)
    assert all_rows(shares) == list(range(128))
    groups = [group for share in shares for group in share]
    assert all(lengths[group].sum() <= 1000 or len(group) == 1 for group in groups)
    assert len({len(share) for share in shares}) == 1
    assert len(groups) <= len(long) + 2 + num_ranks - 1  # 1,280 tokens need two micro-batches


def test_long_sample_costs_more_than_short_ones_of_equal_tokens() -> None:
    lengths = np.array([4096, *([256] * 16), *([256] * 4)])
    shares = MicroBatchPlan(lengths, True, 8192, quadratic=attention_share(512)).assign(range(21), 2)
    with_long = next(share[0] for share in shares if 0 in share[0])
    assert lengths[with_long].sum() < lengths.sum() / 2
    assert attention_share(512) == pytest.approx(1 / 6144)
