"""How much better a sample's reward is than its group's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from verl_ext.verl_api import compute_grpo_outcome_advantage


@dataclass(frozen=True)
class Advantages:
    """Of all samples of some groups.

    Attributes:
        values: (samples,), float32; zero throughout a group whose rewards are all the same, and without a reward.
        rewarded: (samples,), bool; whether there is a reward. A sample without one has no place in the loss.
        num_without_signal: groups of equal rewards, or of fewer than two, from which nothing can be learnt.
    """

    values: torch.Tensor
    rewarded: torch.Tensor
    num_without_signal: int


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Whether the rewards of a group differ in float32, which advantages are computed in; None is no reward."""
    return len(torch.tensor([reward for reward in rewards if reward is not None], dtype=torch.float32).unique()) > 1


def group_advantages(rewards: Sequence[float | None], groups: Sequence[int], divide_by_std: bool) -> Advantages:
    """Reward minus the mean of the group's, divided by the group's standard deviation or not.

    The formula is verl's `compute_grpo_outcome_advantage`: GRPO (arXiv 2402.03300, equation in section 4.1.2) with the
    division, Dr. GRPO (arXiv 2503.20783) without it.

    Args:
        rewards: of each sample; None for one without a reward, which does not count in its group.
        groups: number of each sample's group; a group is whole here and has at least two samples.
        divide_by_std: `algorithm.norm_adv_by_std_in_grpo`.
    """
    index, counts = _numbered(groups)
    assert int(counts.min()) > 1, "a group of one sample has nothing to be compared with"
    rewarded = np.array([reward is not None for reward in rewards])
    known, of_known = torch.tensor([reward for reward in rewards if reward is not None]), index[rewarded]
    values = torch.zeros(len(rewards))
    # the rounding of the mean, divided by a deviation of nearly nothing, would be an advantage
    with_signal = [has_signal(known[of_known == group].tolist()) for group in range(len(counts))]
    if len(known):
        advantages, _ = compute_grpo_outcome_advantage(
            known[:, None], torch.ones(len(known), 1), of_known, norm_adv_by_std_in_grpo=divide_by_std
        )
        values[torch.from_numpy(rewarded)] = advantages[:, 0] * torch.tensor(with_signal)[torch.from_numpy(of_known)]
    return Advantages(values, torch.from_numpy(rewarded), with_signal.count(False))


def _numbered(groups: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each sample's group as a number from 0, and the groups' sizes."""
    _, index, counts = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    return index, counts
