"""Group advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_ext.grpo.algorithm import group_advantages, has_signal


def verl_advantages(rewards: list[float], groups: list[int], divide_by_std: bool) -> torch.Tensor:
    """verl's advantages of each sample at each of three tokens, in float64."""
    at_the_end = torch.zeros(len(rewards), 3, dtype=torch.float64)
    at_the_end[:, 2] = torch.tensor(rewards, dtype=torch.float64)
    values, _ = compute_grpo_outcome_advantage(
        at_the_end, torch.ones(len(rewards), 3), np.array(groups), norm_adv_by_std_in_grpo=divide_by_std
    )
    return values


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_verl(seed: int, divide_by_std: bool) -> None:
    """The comparison is per token, with arbitrary group ids."""
    random = np.random.default_rng(seed)
    groups = np.repeat(random.choice(10**6, 7, replace=False), 4).tolist()
    rewards = random.normal(size=28).tolist()
    ours = torch.tensor(group_advantages(rewards, 4, divide_by_std), dtype=torch.float64)
    assert torch.equal(ours[:, None].expand(-1, 3), verl_advantages(rewards, groups, divide_by_std))


@pytest.mark.parametrize("seed", range(5))
def test_advantages_equal_published_formula(seed: int) -> None:
    """(r - mean) / (std + eps) with the sample standard deviation, as in the GRPO paper and TRL."""
    rewards = np.random.default_rng(seed).normal(size=(6, 5))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    ours = group_advantages(rewards.ravel().tolist(), 5, True)
    np.testing.assert_allclose(ours, expected.ravel(), rtol=1e-9)


def test_large_offset_costs_no_accuracy() -> None:
    """Neighboring float32 numbers near 1000 differ by 6e-5."""
    rewards = [0.0, 1e-4, 0.0, 0.0]
    offset = [1000 + reward for reward in rewards]
    assert has_signal(offset)
    for divide_by_std in (True, False):
        expected = group_advantages(rewards, 4, divide_by_std)
        np.testing.assert_allclose(group_advantages(offset, 4, divide_by_std), expected, rtol=1e-6)


def test_equal_rewards_give_zero_advantage() -> None:
    """verl divides the rounding error of the mean by 1e-6."""
    rewards, groups = [0.1, 0.7] * 4 + [1e9 + 0.1] * 7 + [1e9 + 0.1 + 2e-7] + [0.1] * 8, [0] * 8 + [1] * 8 + [2] * 8
    ours = torch.tensor(group_advantages(rewards, 8, True))
    assert ours[8:].eq(0).all() and ours[:8].abs().min() > 0.5
    assert verl_advantages(rewards, groups, True)[8:].abs().max() > 0.1


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_samples_without_reward_are_excluded(divide_by_std: bool) -> None:
    """The others get the advantages of the group without them; a single remaining sample gets none."""
    rewards = [1.0, None, 0.0, 3.0, None, 5.0, None, None, 2.0, 2.0, None, 2.0]
    ours = torch.tensor(group_advantages(rewards, 4, divide_by_std), dtype=torch.float64)
    expected = verl_advantages([1.0, 0.0, 3.0], [0] * 3, divide_by_std)[:, 0]
    assert torch.equal(ours[[0, 2, 3]], expected) and ours.count_nonzero() == 3
    groups = [rewards[start : start + 4] for start in range(0, 12, 4)]
    assert [has_signal(group) for group in groups] == [True, False, False]


def test_no_rewards_give_zero_advantages() -> None:
    assert group_advantages([None] * 4, 2, True) == [0.0] * 4


def test_group_of_one_is_rejected() -> None:
    """Its advantage would be the raw reward."""
    with pytest.raises(AssertionError, match="at least two samples"):
        group_advantages([1.0, 2.0, 3.0], 1, True)
