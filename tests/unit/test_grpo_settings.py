"""Each key of the stage grpo reaches the part that it is for, under that part's own name."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from verl_ext.errors import UserError
from verl_ext.grpo.loss import LossSettings
from verl_ext.grpo.rewards.environment import RewardSettings
from verl_ext.grpo.rollout.completion import Sampling
from verl_ext.grpo.rollout.vllm_engine import VllmSettings
from verl_ext.launch.grpo_check import check_rewards
from verl_ext.trainer import grpo_settings
from verl_ext.trainer.stages import GRPOConfig, load_config


def config_with(*overrides: str) -> GRPOConfig:
    config = load_config("grpo", list(overrides))
    assert isinstance(config, GRPOConfig)
    return config


def test_the_loss() -> None:
    clips = ["actor.clip_ratio_low=0.11", "actor.clip_ratio_high=0.22", "actor.clip_ratio_c=3.3"]
    others = ["actor.entropy_coeff=0.01", "actor.use_kl_loss=true", "actor.kl_loss_coef=0.4", "actor.kl_loss_type=k2"]
    norm = ["actor.loss_agg_mode=seq-mean-token-sum-norm", "actor.loss_scale_factor=77"]
    expected = LossSettings(0.11, 0.22, 3.3, "seq-mean-token-sum-norm", 77, 0.01, 0.4, "k2")
    assert grpo_settings.loss_settings(config_with(*clips, *others, *norm)) == expected


def test_what_the_loss_takes_where_a_key_is_left_out() -> None:
    found = grpo_settings.loss_settings(config_with("data.max_response_length=99", "actor.kl_loss_coef=0.4"))
    assert found.loss_scale_factor == 99 and found.kl_loss_coef == 0.0


def test_the_rollout_correction() -> None:
    level, threshold = "algorithm.rollout_correction.rollout_is=token", "rollout_is_threshold=1.5"
    found = grpo_settings.rollout_correction(config_with(level, f"algorithm.rollout_correction.{threshold}"))
    assert found == ("token", 1.5) and grpo_settings.rollout_correction(config_with()) is None


def test_the_rewards() -> None:
    limits = ["reward.cpu_s=2", "reward.wall_s=3", "reward.memory_mb=400", "reward.time_limit_s=5"]
    others = ["reward.isolation=rlimits", "reward.packages=[numpy,pandas]", "reward.num_workers=6"]
    lengths = ["reward.length_buffer=7", "data.max_response_length=80"]
    expected = RewardSettings("rlimits", ["numpy", "pandas"], 2, 3, 400, 6, 5, 80, 7)
    assert grpo_settings.reward_settings(config_with(*limits, *others, *lengths)) == expected


@pytest.mark.parametrize(
    ("functions", "buffer", "is_refused"),
    [
        ("reward_format", 64, False),
        ("length_penalty*0.5", 64, True),
        ("length_penalty", 8, False),
        ("reward_format", 0, True),
    ],
)
def test_the_buffer_must_fit_where_the_penalty_is_wanted(functions: str, buffer: int, is_refused: bool) -> None:
    words = [f"reward.functions=[{functions}]", f"reward.length_buffer={buffer}", "data.max_response_length=32"]
    with pytest.raises(UserError, match="reward.length_buffer") if is_refused else nullcontext():
        check_rewards(config_with("rollout.engine=hf", *words))


def test_how_completions_are_drawn() -> None:
    words = ["rollout.temperature=0.7", "rollout.top_p=0.8", "rollout.top_k=9", "data.max_response_length=80"]
    assert grpo_settings.sampling(config_with(*words)) == Sampling(0.7, 0.8, 9, 80)


def test_vllm() -> None:
    lengths = ["data.max_prompt_length=30", "data.max_response_length=80", "rollout.max_num_seqs=11"]
    memory = ["rollout.gpu_memory_utilization=0.3", "rollout.free_cache_engine=false", "rollout.dtype=float16"]
    others = ["rollout.tensor_model_parallel_size=2", "rollout.vllm={swap_space: 1}", "model.trust_remote_code=true"]
    found = grpo_settings.vllm_settings(config_with(*lengths, *memory, *others), "a/model", [3])
    assert found == VllmSettings("a/model", True, "float16", 110, [3], 11, 0.3, False, 2, {"swap_space": 1})


@pytest.mark.parametrize(("device", "bucket"), [("cuda", 64 << 20), ("cpu", grpo_settings.CPU_BUCKET_MB << 20)])
def test_buckets_of_weights(device: str, bucket: int) -> None:
    config = config_with("rollout.update_weights_bucket_megabytes=64")
    assert grpo_settings.bucket_bytes(config, device) == bucket
