"""Answers with rewards, and the settings of a text environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_ext.grpo.config import RewardConfig
from verl_ext.grpo.protocols import Environment, Prompt, Reward, Trajectory
from verl_ext.grpo.sampling import Completion

REWARD = RewardConfig(packages=[], cpu_s=2, num_workers=2, time_limit_s=1.0, length_buffer=20)
MAX_TOKENS = 100


def sample(text: str, ground_truth: Any, num_tokens: int = 4, **fields: Any) -> Trajectory:
    """A trajectory with this answer."""
    fields = {"reward_model": {"style": "rule", "ground_truth": ground_truth}, **fields}
    completion = Completion((1,) * num_tokens, torch.zeros(num_tokens), False, text)
    return Trajectory(Prompt("s", 0, fields), 0).act(completion)


def rewards_of(environment: Environment, trajectories: Sequence[Trajectory]) -> list[Reward]:
    """The rewards of a batch, as a step collects them: all begin before one is waited for."""
    waits = [environment.step(trajectory) for trajectory in trajectories]
    rewards = [wait().reward for wait in waits]
    environment.end_batch()
    assert all(rewards), "an episode has not ended"
    return [reward for reward in rewards if reward is not None]
