"""Answers with rewards, and the settings of a text environment."""

from __future__ import annotations

from typing import Any

import torch

from verl_ext.grpo.config import RewardConfig
from verl_ext.grpo.policy import Prompt, Sample
from verl_ext.grpo.rollout.completion import Completion

REWARD = RewardConfig(packages=[], cpu_s=2, num_workers=2, time_limit_s=1.0, length_buffer=20)
MAX_TOKENS = 100


def sample(text: str, ground_truth: str, num_tokens: int = 4, **content: Any) -> Sample:
    """A sample with this answer."""
    content = {"reward_model": {"style": "rule", "ground_truth": ground_truth}, **content}
    completion = Completion((1,) * num_tokens, torch.zeros(num_tokens), False, text)
    return Sample(Prompt("s", 0, content), 0, completion)
