"""What the stage grpo can refuse before torchrun starts."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.config.checks import GATHERING, check_choices, check_ranges, check_without_effect
from verl_ext.config.inputs import file_list
from verl_ext.errors import UserError
from verl_ext.grpo.rewards.registry import LENGTH_PENALTY, wanted_rewards
from verl_ext.launch import reward_check

_KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
CHOICES: dict[str, tuple[str | bool | None, ...]] = {
    **GATHERING,
    **reward_check.CHOICES,
    "actor.loss_agg_mode": ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"),
    "actor.kl_loss_type": (*_KL_TYPES, *(f"{name}+" for name in _KL_TYPES)),
    "rollout.engine": ("vllm", "hf"),
    "rollout.dtype": ("auto", "bfloat16", "float16", "float32"),
    "reward.isolation": ("auto", "bwrap", "sandlock", "rlimits"),
    "algorithm.rollout_correction.rollout_is": (None, "token", "sequence"),
}
RANGES = {  # lowest and highest value allowed
    **reward_check.RANGES,
    "data.max_prompt_length": (1, math.inf),
    "data.max_response_length": (1, math.inf),
    "data.eval_every_steps": (0, math.inf),
    "algorithm.rollout_correction.rollout_is_threshold": (1e-9, math.inf),
    "actor.loss_scale_factor": (1, math.inf),
    "actor.kl_loss_coef": (0, math.inf),
    "rollout.temperature": (1e-3, 100),
    "rollout.top_p": (1e-6, 1),
    "rollout.top_k": (-1, math.inf),
    "rollout.max_num_seqs": (1, math.inf),
    "rollout.tensor_model_parallel_size": (1, math.inf),
    "rollout.gpu_memory_utilization": (0.01, 1),
    "rollout.update_weights_bucket_megabytes": (1, math.inf),
    "reward.time_limit_s": (1e-3, math.inf),
    "reward.num_workers": (1, math.inf),
    "reward.cpu_s": (1e-3, math.inf),
    "reward.wall_s": (1e-3, math.inf),
    "reward.memory_mb": (16, math.inf),
}
OF_CHATS = {  # settings of the stage sft: the value they must keep here
    "data.max_length": 1,
    "data.truncation": "error",
    "data.balance_dp_token": False,
    "data.response_key": "answer",
    "data.prompt_dict_keys": None,
    "data.response_dict_keys": None,
    "data.multiturn.enable": False,
    "data.multiturn.messages_key": "messages",
    "data.multiturn.tools_key": "tools",
    "data.multiturn.enable_thinking_key": "enable_thinking",
    "data.custom_cls.path": None,
    "data.custom_cls.name": None,
    "use_remove_padding": False,
    "ulysses_sequence_parallel_size": 1,
}


def check_grpo(config: DictConfig, world_size: int) -> None:
    """Refuse settings of this stage that cannot work, whatever model and data they are for.

    Raises:
        UserError: the first of them and how to mend it.
    """
    check_values(config)
    check_engines(config, world_size)
    wanted_rewards(list(config.reward.functions))
    if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise UserError("rollout.engine=vllm needs vLLM, which is not installed; install it, or set rollout.engine=hf")


def check_values(config: DictConfig) -> None:
    """Single values, and settings of other stages."""
    check_choices(config, CHOICES)
    check_ranges(config, RANGES)
    # of use to length_penalty alone: short answers to other rewards need no buffer below their length
    penalised = any(
        each.plugin is None and each.name == LENGTH_PENALTY for each in wanted_rewards(config.reward.functions)
    )
    check_ranges(config, {"reward.length_buffer": (1, config.data.max_response_length if penalised else math.inf)})
    check_without_effect(config, OF_CHATS, "in this stage, whose data are prompts")
    if config.trainer.test_freq != config.data.eval_every_steps:
        raise UserError("trainer.test_freq is data.eval_every_steps in this stage; set that instead")
    data = config.data
    if data.eval_every_steps and data.eval_split == "test" and not file_list(data.val_files):
        raise UserError(
            f"data.eval_every_steps is {data.eval_every_steps}, but data.val_files is empty; set it, set "
            "data.eval_split=train to evaluate on training prompts, or set data.eval_every_steps=0"
        )
    if config.rollout.n < 2:
        raise UserError(f"rollout.n is {config.rollout.n}; a group needs 2 completions or more to be compared")


def check_engines(config: DictConfig, world_size: int) -> None:
    """Engines divide over ranks."""
    if world_size % config.rollout.tensor_model_parallel_size:
        raise UserError(
            f"rollout.tensor_model_parallel_size is {config.rollout.tensor_model_parallel_size}, which does not divide "
            f"the {world_size} ranks; take a divisor"
        )


def check_length(config: DictConfig) -> None:
    """Prompt and completion fit into the model's context, where its directory says how long that is."""
    path = Path(config.model.partial_pretrain).expanduser() / "config.json"
    longest = json.loads(path.read_text()).get("max_position_embeddings") if path.is_file() else None
    wanted = config.data.max_prompt_length + config.data.max_response_length
    if longest is not None and wanted > longest:
        raise UserError(
            f"data.max_prompt_length + data.max_response_length is {wanted}, more than the model's context of "
            f"{longest} tokens; lower one of them"
        )
