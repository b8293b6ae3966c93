"""Advantages within groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage

from verl_ext.grpo.algorithm import group_advantages, has_signal


def verls(rewards: list[float], groups: list[int], divide_by_std: bool) -> torch.Tensor:
    """What verl gives a sample at each of three tokens."""
    at_the_end = torch.zeros(len(rewards), 3)
    at_the_end[:, 2] = torch.tensor(rewards)
    values, _ = compute_grpo_outcome_advantage(
        at_the_end, torch.ones(len(rewards), 3), np.array(groups), norm_adv_by_std_in_grpo=divide_by_std
    )
    return values


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_verls(seed: int, divide_by_std: bool) -> None:
    """At each token, for any numbers of the groups."""
    random = np.random.default_rng(seed)
    groups = np.repeat(random.choice(10**6, 7, replace=False), 4).tolist()
    rewards = random.normal(size=28).tolist()
    ours = torch.tensor(group_advantages(rewards, 4, divide_by_std))
    assert torch.equal(ours[:, None].expand(-1, 3), verls(rewards, groups, divide_by_std))


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_published_formula(seed: int) -> None:
    """(r - mean) / (std + eps) with the sample's standard deviation, as GRPO's paper and TRL have it."""
    rewards = np.random.default_rng(seed).normal(size=(6, 5))
    expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, ddof=1, keepdims=True) + 1e-6)
    ours = group_advantages(rewards.ravel().tolist(), 5, True)
    np.testing.assert_allclose(ours, expected.ravel(), rtol=1e-4, atol=1e-5)


def test_equal_rewards_have_no_advantage() -> None:
    """Not even the rounding of their mean, which verl divides by 1e-6."""
    rewards, groups = [0.1, 0.7] * 4 + [1.69] * 8 + [0.1] * 8, [0] * 8 + [1] * 8 + [2] * 8
    ours = torch.tensor(group_advantages(rewards, 8, True))
    assert ours[8:].eq(0).all() and ours[:8].abs().min() > 0.5
    assert verls(rewards, groups, True)[8:].abs().max() > 0.1


@pytest.mark.parametrize("divide_by_std", [True, False])
def test_samples_without_a_reward_are_left_out(divide_by_std: bool) -> None:
    """The others have the advantages that they would have without them; one alone has none."""
    rewards = [1.0, None, 0.0, 3.0, None, 5.0, None, None, 2.0, 2.0, None, 2.0]
    ours = torch.tensor(group_advantages(rewards, 4, divide_by_std))
    expected = verls([1.0, 0.0, 3.0], [0] * 3, divide_by_std)[:, 0]
    assert torch.equal(ours[[0, 2, 3]], expected) and ours.count_nonzero() == 3
    groups = [rewards[start : start + 4] for start in range(0, 12, 4)]
    assert [has_signal(group) for group in groups] == [True, False, False]


def test_no_reward_at_all() -> None:
    assert group_advantages([None] * 4, 2, True) == [0.0] * 4


def test_a_group_of_one_is_refused() -> None:
    """It would learn its reward as it is."""
    with pytest.raises(AssertionError, match="at least two samples"):
        group_advantages([1.0, 2.0, 3.0], 1, True)
