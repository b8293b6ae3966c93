"""The language model's policy and environment, as the configuration wants them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.data.chat_template import stop_token_ids
from verl_ext.distributed import on_every_rank
from verl_ext.grpo.config import RolloutConfig
from verl_ext.grpo.policy import LogProbs
from verl_ext.grpo.rewards.environment import TextEnvironment
from verl_ext.grpo.rollout.completion import Sampling
from verl_ext.grpo.rollout.engine import RolloutEngine, WeightKeeper
from verl_ext.grpo.rollout.hf_engine import HfRollout
from verl_ext.grpo.rollout.vllm_engine import VllmRollout
from verl_ext.grpo.rollout.weights import WeightSource
from verl_ext.grpo.tokens.layout import Layout
from verl_ext.grpo.tokens.model import forward_cost
from verl_ext.grpo.tokens.policy import TokenModel, TokenPolicy
from verl_ext.processes import quiet_stdout
from verl_ext.trainer.hardware import autocast, pick_precision
from verl_ext.trainer.lora import uses_lora
from verl_ext.trainer.model import build_model, local_model_path
from verl_ext.trainer.stages import GRPOConfig

MB = 1 << 20
CPU_BUCKET_MB = 4
"""What fits a processor's cache is gathered in two thirds of the time of larger buckets."""


def make_environment(config: GRPOConfig) -> TextEnvironment:
    """The reward functions of the recipe; on every rank its own.

    Raises:
        UserError: a function cannot be loaded, or the judge's isolation does not work here.
    """
    num_ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return on_every_rank(lambda: TextEnvironment(config.reward, config.data.max_response_length, num_ranks_here))


def make_policy(
    config: GRPOConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, device_mesh: DeviceMesh
) -> TokenPolicy:
    """The model with its engine and its frozen reference; collective.

    Raises:
        UserError: the engine cannot be built.
    """
    device_name, rollout = config.trainer.device, config.rollout
    precision = lambda: autocast(pick_precision(config.model.mixed_precision, device_name), device_name)  # noqa: E731
    # first, for building vLLM changes classes of transformers if it has none of its own for the model
    reference = make_reference(config, model, device_mesh)
    engine = make_engine(config, model, tokenizer, precision)
    source = None
    if isinstance(engine, WeightKeeper):
        source = WeightSource(model, engine.dtype, device_name, bucket_bytes(rollout, device_name))
    return TokenPolicy(
        TokenModel(
            model,
            reference,
            precision,
            device_name,
            config.actor.entropy_coeff != 0,
            Layout(tokenizer.pad_token_id, forward_cost(model) if config.actor.share_prompts else None),
        ),
        tokenizer,
        engine,
        source,
        Sampling(rollout.temperature, rollout.top_p, rollout.top_k, config.data.max_response_length),
        config.trainer.seed,
    )


def make_engine(
    config: GRPOConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    precision: Callable[[], AbstractContextManager[Any]],
) -> RolloutEngine:
    """What `rollout.engine` names; collective."""
    rollout, data, path = config.rollout, config.data, local_model_path(config)
    ends = stop_token_ids(generation_settings(path), tokenizer)
    if rollout.engine == "hf":
        return HfRollout(model, tokenizer.pad_token_id, ends, rollout.max_num_seqs, precision, config.trainer.device)
    with quiet_stdout():
        return on_every_rank(
            lambda: VllmRollout(
                rollout,
                path,
                max_model_len=data.max_prompt_length + data.max_response_length,
                end_tokens=ends,
                trust_remote_code=config.model.trust_remote_code,
            )
        )


def bucket_bytes(rollout: RolloutConfig, device_name: str) -> int:
    """Most bytes of weights that are on their way to the engine at a time."""
    megabytes = rollout.update_weights_bucket_megabytes
    return (min(megabytes, CPU_BUCKET_MB) if device_name == "cpu" else megabytes) * MB


def generation_settings(path: str) -> GenerationConfig | None:
    """Those that come with a model, if any do."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def make_reference(
    config: GRPOConfig, model: PreTrainedModel, device_mesh: DeviceMesh
) -> Callable[[Callable[[PreTrainedModel], LogProbs]], LogProbs]:
    """What has the frozen model evaluate something: the model without its new adapters, or another one."""
    if not config.actor.use_kl_loss:
        return lambda evaluate: evaluate(model)
    if uses_lora(config) and config.model.lora_adapter_path is None:

        def without_adapters(evaluate: Callable[[PreTrainedModel], LogProbs]) -> LogProbs:
            with model.disable_adapter():
                return evaluate(model)

        return without_adapters
    frozen = build_model(config, device_mesh, config.trainer.device).eval()
    frozen.requires_grad_(False)
    return lambda evaluate: evaluate(frozen)
