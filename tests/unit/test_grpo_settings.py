"""GRPO configuration keys reach the components that they configure."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import yaml

from eval_pipeline.judge import JudgeClient, JudgeConfig, ResourceLimits
from tests.helpers.grpo import MAX_TOKENS
from verl_ext.config.schema import keys, without_effect
from verl_ext.errors import UserError
from verl_ext.grpo.config import CPU_BUCKET_MB, OWN_VLLM_ARGUMENTS, RewardConfig, RolloutConfig
from verl_ext.grpo.rewards import text_environment
from verl_ext.grpo.rewards.check import check_reward_settings
from verl_ext.grpo.vllm_engine import _arguments
from verl_ext.launch.configure import resolve_config
from verl_ext.trainer.stages import STAGES, GRPOConfig, load_config
from verl_ext.vllm_setup import small_model_arguments


def config_with(*overrides: str) -> GRPOConfig:
    config = load_config("grpo", list(overrides))
    assert isinstance(config, GRPOConfig)
    return config


def test_judge_gets_configured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    class Watched(JudgeClient):
        def __init__(self, config: JudgeConfig, *, section: str) -> None:
            given.extend((config, section))
            super().__init__(config, section=section)

    monkeypatch.setattr(text_environment, "JudgeClient", Watched)
    limits = {"isolation": "rlimits", "packages": ["numpy"], "cpu_s": 2, "wall_s": 3, "memory_mb": 400}
    text_environment.TextEnvironment(RewardConfig(**limits, num_workers=6), MAX_TOKENS, num_ranks_here=1).close()  # type: ignore[arg-type]
    judged = ResourceLimits(cpu_s=2, wall_s=3, memory_mb=400)
    assert given == [JudgeConfig(isolation="rlimits", num_workers=6, packages=["numpy"], limits=judged), "reward"]


@pytest.mark.parametrize(
    ("functions", "buffer", "is_refused"),
    [
        ("reward_format", 64, False),
        ("length_penalty*0.5", 64, True),
        ("length_penalty", 8, False),
        ("reward_format", 0, True),
    ],
)
def test_length_buffer_must_fit_if_penalty_is_used(functions: str, buffer: int, is_refused: bool) -> None:
    words = [f"reward.functions=[{functions}]", f"reward.length_buffer={buffer}", "data.max_response_length=32"]
    with pytest.raises(UserError, match="reward.length_buffer") if is_refused else nullcontext():
        config = config_with(*words)
        check_reward_settings(config.reward, config.data)


def test_rejects_empty_list_of_reward_functions() -> None:
    with pytest.raises(UserError, match="reward.functions is empty"):
        config_with("reward.functions=[]")


def test_vllm_gets_rollout_settings() -> None:
    memory: Any = {"gpu_memory_utilization": 0.3, "max_num_seqs": 11, "dtype": "float16"}
    rollout = RolloutConfig(**memory, tensor_model_parallel_size=2, vllm={"swap_space": 1})
    found = _arguments(rollout, on_gpu=True, releases_memory=True, small={"enforce_eager": True, "swap_space": 3})
    names = ["gpu_memory_utilization", "max_num_seqs", "dtype", "tensor_parallel_size", "swap_space"]
    assert [found[name] for name in names] == [0.3, 11, "float16", 2, 1]
    assert found["enable_sleep_mode"] and found["enforce_eager"]
    # its kernels use the layout in which weights are sent
    assert found["moe_backend"] == "triton"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("gpu_memory_utilization", "set rollout.gpu_memory_utilization"),
        ("tensor_parallel_size", "set rollout.tensor_model_parallel_size"),
        ("max_model_len", "set data.max_prompt_length and data.max_response_length"),
        ("logprobs_mode", "remove it"),
    ],
)
def test_vllm_arguments_that_engine_sets_are_rejected(name: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"^rollout.vllm.{name} is set elsewhere; {fix}"):
        config_with(f"rollout.vllm.{name}=1")
    assert config_with("rollout.vllm.max_num_batched_tokens=4096").rollout.vllm == {"max_num_batched_tokens": 4096}


def test_no_vllm_argument_is_silently_overridden() -> None:
    default = _arguments(RolloutConfig(), on_gpu=True, releases_memory=True, small={})
    given = RolloutConfig(vllm=dict.fromkeys(default, "given"))
    found = _arguments(given, on_gpu=True, releases_memory=True, small={})
    overridden = {name for name, value in found.items() if value != "given"}
    of_model = {"model", "max_model_len", "trust_remote_code", "logits_processors"}  # set by `VLLMRolloutEngine`
    of_ranks = {"pipeline_parallel_size", "data_parallel_size"}
    assert overridden | of_model | of_ranks == OWN_VLLM_ARGUMENTS.keys()


SMALL = {
    "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 576, "num_attention_heads": 6,
    "num_key_value_heads": 2, "vocab_size": 493, "layer_types": ["full_attention"] * 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 28}),
        (
            {"num_key_value_heads": 6},
            {"enforce_eager": True, "kv_cache_memory_bytes": 2 * 4 * 6 * 32 * 4 * (1024 + 32) * 64},
        ),
        ({"num_hidden_layers": 48, "num_key_value_heads": 6}, {"enforce_eager": True}),  # 5 GB
        (
            {"num_hidden_layers": 48, "num_key_value_heads": 6, "max_position_embeddings": 512},
            {"enforce_eager": True, "kv_cache_memory_bytes": 2 * 48 * 6 * 32 * 4 * (512 + 32) * 64},
        ),
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, {}),
        ({"hidden_size": None}, {}),
        ({"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}, {}),
        ({"num_experts": 128}, {}),
    ],
)
def test_small_model_gets_small_cache(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    assert small_model_arguments({**SMALL, **changes}, max_model_len=1024, max_num_seqs=64) == expected
    assert small_model_arguments({}, max_model_len=1024, max_num_seqs=64) == {}


@pytest.mark.parametrize(("on_cpu", "bucket"), [(False, 64 << 20), (True, CPU_BUCKET_MB << 20)])
def test_weight_bucket_size_follows_setting_on_gpu(on_cpu: bool, bucket: int) -> None:
    assert RolloutConfig(update_weights_bucket_megabytes=64).bucket_bytes(on_cpu) == bucket


LOSS, MEANS = "actor.policy_loss.loss_mode", "actor.loss_agg_mode=seq-mean-token-mean"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([f"{LOSS}=gspo"], r"loss_mode=gspo averages .* set actor.loss_agg_mode=seq-mean-token-mean"),
        ([f"{LOSS}=sapo", "actor.loss_agg_mode=seq-mean-token-sum-norm"], "loss_mode=sapo averages"),
        ([f"{LOSS}=gspo", MEANS], None),
        ([f"{LOSS}=sapo", MEANS], None),
        ([f"{LOSS}=geo_mean"], r"geometric mean .* set actor.loss_agg_mode=seq-mean-token-mean"),
        ([f"{LOSS}=geo_mean", MEANS], None),
        ([f"{LOSS}=clip-cov"], "clip_cov"),
        ([f"{LOSS}=clip_cov", "actor.policy_loss.clip_cov_lb=5"], "clip_cov_lb=5 is not below clip_cov_ub=5"),
    ],
)
def test_incompatible_loss_and_aggregation_are_rejected(words: list[str], says: str | None) -> None:
    with pytest.raises(UserError, match=says) if says else nullcontext():
        config_with(*words)


def test_kl_cov_needs_several_updates_per_step() -> None:
    config_with(f"{LOSS}=kl_cov", "actor.ppo_epochs=2")
    with pytest.raises(UserError, match="set actor.ppo_epochs or actor.ppo_mini_batch_size for several updates"):
        config_with(f"{LOSS}=kl_cov")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("algorithm.adv_estimator=rloo", "leave it at grpo: GRPO is the only one"),
        ("algorithm.use_kl_in_reward=true", "set actor.use_kl_loss"),
    ],
)
def test_keys_of_verl_for_other_advantages_are_rejected(word: str, says: str) -> None:
    config_with("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false")
    with pytest.raises(UserError, match=says):
        config_with(word)


@pytest.mark.parametrize("loss", ["clip_cov", "kl_cov", "vanilla"])
@pytest.mark.parametrize(("num_ranks", "size"), [(1, 48), (2, 24), (4, 12)])
def test_covariance_losses_need_one_micro_batch_per_update(loss: str, num_ranks: int, size: int) -> None:
    """An update has 8 prompts of 6 samples over all ranks."""
    words = [f"{LOSS}={loss}", "data.train_batch_size=16", "actor.ppo_mini_batch_size=8", "rollout.n=6"]
    config_with(*words, f"data.micro_batch_size_per_gpu={size}").check_ranks(num_ranks)
    config = config_with(*words, f"data.micro_batch_size_per_gpu={size - 1}")
    says = (
        rf"{loss} picks tokens by covariances .*{size} samples of an update; set data.micro_batch_size_per_gpu={size},"
    )
    with pytest.raises(UserError, match=says) if loss != "vanilla" else nullcontext():
        config.check_ranks(num_ranks)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["actor.kl_loss_coef=0.5"], ["actor.kl_loss_coef=0.5 has no effect without actor.use_kl_loss=true"]),
        (["actor.kl_loss_coef=0.5", "actor.use_kl_loss=true", "rollout.engine=hf"], []),
        (["model.lora_alpha=8"], ["model.lora_alpha=8 has no effect without model.lora_rank"]),
        (["model.lora_alpha=8", "model.lora_rank=4"], []),
        (["model.lora_adapter_path=/adapters"], []),
        (
            ["model.lora_alpha=8", "model.lora_adapter_path=/adapters"],
            ["model.lora_alpha=8 has no effect without model.lora_rank"],
        ),
        (
            ["model.lora_rank=4", "model.lora_adapter_path=/adapters"],
            ["model.lora_rank=4 has no effect without model.lora_adapter_path=null"],
        ),
    ],
)
def test_settings_without_effect_are_named(
    words: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert without_effect(resolve_config("grpo", words)) == told
    assert capsys.readouterr().err.splitlines() == [f"warning: {sentence}" for sentence in told]
    assert without_effect(resolve_config("grpo", [])) == []


def test_needed_settings_exist() -> None:
    for stage in STAGES.values():
        known = keys(stage.root)
        needs = [need.partition("=") for key in known.values() for need in key.setting.needs]
        assert all(known[name].fits(yaml.safe_load(value)) for name, _, value in needs if value), stage
        assert {name for name, _, _ in needs} <= {*known}, stage
    assert len([key for key in keys(GRPOConfig).values() if key.setting.needs]) > 10
