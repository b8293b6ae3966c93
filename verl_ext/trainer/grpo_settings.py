"""The configuration of the stage grpo as its parts take it: a function for each part."""

from __future__ import annotations

import math

from verl_ext.grpo.loss import LossSettings
from verl_ext.grpo.rewards.environment import RewardSettings
from verl_ext.grpo.rollout.completion import Sampling
from verl_ext.grpo.rollout.vllm_engine import VllmSettings
from verl_ext.trainer.stages import GRPOConfig

MB = 1 << 20
CPU_BUCKET_MB = 4
"""What fits a processor's cache is gathered in two thirds of the time of larger buckets."""


def loss_settings(config: GRPOConfig) -> LossSettings:
    """The section `actor` as the loss reads it."""
    actor = config.actor
    return LossSettings(
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        kl_loss_type=actor.kl_loss_type,
    )


def rollout_correction(config: GRPOConfig) -> tuple[str, float] | None:
    """Level and threshold of truncated importance sampling, None for none of it."""
    correction = config.algorithm.rollout_correction
    return (correction.rollout_is, correction.rollout_is_threshold) if correction.rollout_is else None


def reward_settings(config: GRPOConfig) -> RewardSettings:
    """The section `reward`, with the longest answer."""
    reward = config.reward
    return RewardSettings(
        isolation=reward.isolation,
        packages=list(reward.packages),
        cpu_s=reward.cpu_s,
        wall_s=reward.wall_s,
        memory_mb=reward.memory_mb,
        num_workers=reward.num_workers,
        time_limit_s=reward.time_limit_s,
        max_tokens=config.data.max_response_length,
        length_buffer=reward.length_buffer,
    )


def sampling(config: GRPOConfig) -> Sampling:
    """How completions are drawn."""
    rollout = config.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
    )


def vllm_settings(config: GRPOConfig, model: str, end_tokens: list[int]) -> VllmSettings:
    """The section `rollout` as vLLM is set up by it.

    Args:
        config: the resolved configuration.
        model: directory with the model's configuration.
        end_tokens: any of them ends a completion.
    """
    rollout = config.rollout
    return VllmSettings(
        model=model,
        trust_remote_code=config.model.trust_remote_code,
        dtype=rollout.dtype,
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        end_tokens=end_tokens,
        max_num_seqs=rollout.max_num_seqs,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        free_cache_engine=rollout.free_cache_engine,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        arguments=dict(rollout.vllm),
    )


def bucket_bytes(config: GRPOConfig, device_name: str) -> int:
    """Most bytes of weights that are on their way to the engine at a time."""
    most = CPU_BUCKET_MB if device_name == "cpu" else math.inf
    return int(min(config.rollout.update_weights_bucket_megabytes, most)) * MB
