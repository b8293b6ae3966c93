"""Rewards, engine and lengths of a GRPO run, checked before torchrun starts."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from verl_ext.commands import missing_package
from verl_ext.errors import UserError
from verl_ext.grpo.rewards.registry import LENGTH_PENALTY, wanted_rewards
from verl_ext.trainer.stages import GRPOConfig


def check_rewards(config: GRPOConfig) -> None:
    """Refuse unknown reward functions, a length buffer longer than completions, and an engine that is not installed.

    Raises:
        UserError: the first of them and how to fix it.
    """
    rewards = wanted_rewards(list(config.reward.functions))
    # only length_penalty uses the buffer: other rewards of short completions need none below their length
    penalizes = any(each.plugin is None and each.name == LENGTH_PENALTY for each in rewards)
    buffer, longest = config.reward.length_buffer, config.data.max_response_length
    if penalizes and buffer > longest:
        raise UserError(
            f"reward.length_buffer is {buffer}; it must be at most data.max_response_length, which is {longest}"
        )
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError(f"rollout.engine=vllm: {missing_package('vllm')}, or set rollout.engine=hf")


def check_length(config: GRPOConfig) -> None:
    """Prompt and completion fit into the model's context, where its directory says how long that is."""
    path = Path(str(config.model.partial_pretrain)).expanduser() / "config.json"
    longest = json.loads(path.read_text()).get("max_position_embeddings") if path.is_file() else None
    wanted = config.data.max_prompt_length + config.data.max_response_length
    if longest is not None and wanted > longest:
        raise UserError(
            f"data.max_prompt_length + data.max_response_length is {wanted}, more than the model's context of "
            f"{longest} tokens; lower one of them"
        )
