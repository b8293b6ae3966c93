"""The configuration of GRPO: advantages, loss, generation and rewards. Key names are verl's where verl has the key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from verl_ext.config.schema import section, setting, unused
from verl_ext.errors import UserError

KLType = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]

# What settings need to have an effect, see `Setting.needs`
CLIP_COV, KL_COV, SAPO = ((f"actor.policy_loss.loss_mode={name}",) for name in ("clip_cov", "kl_cov", "sapo"))
KL_LOSS = ("actor.use_kl_loss=true",)
VLLM = ("rollout.engine=vllm",)

CPU_BUCKET_MB = 4
"""Buckets that fit into a processor's cache take two thirds of the time of larger ones."""

_FIXED = "remove it, because training depends on the value that the engine sets"
OWN_VLLM_ARGUMENTS = {
    "model": "set model.partial_pretrain",
    "trust_remote_code": "set model.trust_remote_code",
    "max_model_len": "set data.max_prompt_length and data.max_response_length",
    "dtype": "set rollout.dtype",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "tensor_parallel_size": "set rollout.tensor_model_parallel_size",
    "pipeline_parallel_size": "set rollout.tensor_model_parallel_size",
    "data_parallel_size": "remove it, because each rank has its own engine",
    "enable_sleep_mode": "set rollout.free_cache_engine",
    "load_format": _FIXED,
    "skip_tokenizer_init": _FIXED,
    "logits_processors": _FIXED,
    "logprobs_mode": _FIXED,
    "async_scheduling": _FIXED,
    "distributed_executor_backend": _FIXED,
    "cpu_distributed_timeout_seconds": _FIXED,
}
"""Arguments of vllm.LLM that other settings determine, and how to change them."""


@dataclass(kw_only=True)
class DynamicSamplingConfig:
    """`algorithm.dynamic_sampling` (DAPO, arXiv 2503.14476)."""

    max_rounds: int = setting(0, "Maximum number of rounds that resample groups whose rewards are all equal", ge=0)


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """`algorithm.rollout_correction`: truncated importance sampling against the engine's probabilities."""

    rollout_is: Literal["token", "sequence"] | None = setting(None, "Importance sampling level; null disables it")
    rollout_is_threshold: float = setting(
        2.0, "Maximum importance weight", ge=1e-9, needs=("algorithm.rollout_correction.rollout_is",)
    )


@dataclass(kw_only=True)
class AlgorithmConfig:
    """`algorithm`: from rewards to advantages."""

    adv_estimator: str = unused(
        "grpo",
        "GRPO is the only one; for Dr. GRPO, set algorithm.norm_adv_by_std_in_grpo=false and "
        "actor.loss_agg_mode=seq-mean-token-sum-norm",
    )
    use_kl_in_reward: bool = unused(False, "set actor.use_kl_loss")
    norm_adv_by_std_in_grpo: bool = setting(True, "Divide advantages by the standard deviation of the group's rewards")
    dynamic_sampling: DynamicSamplingConfig = section(DynamicSamplingConfig)

    # The step reads this, but only `TokenAlgorithmConfig` has keys for it; without an annotation it is not a field.
    rollout_correction = RolloutCorrectionConfig()


@dataclass(kw_only=True)
class TokenAlgorithmConfig(AlgorithmConfig):
    """`algorithm` of language models."""

    rollout_correction: RolloutCorrectionConfig = section(RolloutCorrectionConfig)


LossMode = Literal["vanilla", "gspo", "sapo", "gpg", "cispo", "geo_mean", "clip_cov", "kl_cov"]
MEAN_OF_MEANS = "seq-mean-token-mean"
LOSSES_OF_MEANS = {
    "gspo": "averages over each completion's tokens, then over completions",
    "sapo": "averages over each completion's tokens, then over completions",
    "geo_mean": "takes the geometric mean of each completion's ratios, then averages over completions",
}
"""Policy losses that verl averages in the mode `MEAN_OF_MEANS`, whatever `loss_agg_mode` is, and how."""
LOSSES_OF_COVARIANCES = ("clip_cov", "kl_cov")
"""Policy losses that pick tokens by covariances over the micro-batch."""


@dataclass(kw_only=True)
class TokenLossConfig:
    """`actor.policy_loss`: a loss of verl's registry and its settings."""

    loss_mode: LossMode = setting("vanilla", "Policy loss; see docs/guides/grpo.md")
    clip_cov_ratio: float = setting(0.0002, "Fraction of tokens that clip_cov excludes", gt=0, le=1, needs=CLIP_COV)
    clip_cov_lb: float = setting(1.0, "Minimum covariance of these tokens", needs=CLIP_COV)
    clip_cov_ub: float = setting(5.0, "Maximum covariance of these tokens", needs=CLIP_COV)
    kl_cov_ratio: float = setting(0.0002, "Fraction of tokens that kl_cov penalizes", gt=0, le=1, needs=KL_COV)
    ppo_kl_coef: float = setting(0.1, "Weight of that penalty", ge=0, needs=KL_COV)


@dataclass(kw_only=True)
class ActorConfig:
    """`actor`: the policy loss. For samples of one decision, all aggregation modes are equal."""

    ppo_mini_batch_size: int | None = setting(
        None, "Prompts per update over all ranks", ge=1, null="one update per pass"
    )
    ppo_epochs: int = setting(1, "Passes over a step's samples", ge=1)
    clip_ratio_low: float = setting(0.2, "Clip ratios below 1 minus this", ge=0, le=1)
    clip_ratio_high: float = setting(0.2, "Clip ratios above 1 plus this", ge=0)
    clip_ratio_c: float = setting(3.0, "Dual clip: maximum ratio if the advantage is negative", gt=1)
    entropy_coeff: float = setting(0.0, "Weight of the entropy bonus", ge=0)

    # The loss reads these, but only `TokenActorConfig` has keys for them; without annotations they are not fields.
    policy_loss, tau_pos, tau_neg = TokenLossConfig(), 1.0, 1.05
    loss_agg_mode, loss_scale_factor = "token-mean", None
    use_kl_loss, kl_loss_coef, kl_loss_type = False, 0.0, "low_var_kl"

    @property
    def has_only_policy_gradient(self) -> bool:
        """Whether the loss has no other term, so that samples with an advantage of 0 add nothing to the gradient."""
        penalizes = self.policy_loss.loss_mode in LOSSES_OF_COVARIANCES or self.use_kl_loss
        return not penalizes and self.entropy_coeff == 0


@dataclass(kw_only=True)
class TokenActorConfig(ActorConfig):
    """`actor` of language models."""

    policy_loss: TokenLossConfig = section(TokenLossConfig)
    tau_pos: float = setting(1.0, "sapo's temperature for positive advantages", gt=0, needs=SAPO)
    tau_neg: float = setting(1.05, "sapo's temperature for negative advantages", gt=0, needs=SAPO)
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = (
        setting("token-mean", "Aggregation of token losses")
    )
    loss_scale_factor: int | None = setting(  # type: ignore[assignment]  # no key, hence None, in the base class
        None,
        "Divisor of seq-mean-token-sum-norm; null: max_response_length",
        ge=1,
        needs=("actor.loss_agg_mode=seq-mean-token-sum-norm",),
    )
    share_prompts: bool = setting(True, "Compute a group's prompt once if possible")
    use_kl_loss: bool = setting(False, "KL penalty toward the initial model")
    kl_loss_coef: float = setting(0.001, "Weight of that penalty", ge=0, needs=KL_LOSS)
    kl_loss_type: KLType = setting(
        "low_var_kl",
        "KL estimator; a trailing + keeps the value but uses the gradient of k2. low_var_kl and k3 are clamped to 10 "
        "per token and have no gradient where clamped; low_var_kl+ and k2 do",
        needs=KL_LOSS,
    )

    def check(self) -> None:
        """Refuse an aggregation mode that the policy loss does not support, and bounds that exclude nothing."""
        mode, loss = self.loss_agg_mode, self.policy_loss
        if loss.loss_mode in LOSSES_OF_MEANS and mode != MEAN_OF_MEANS:
            raise UserError(
                f"actor.policy_loss.loss_mode={loss.loss_mode} {LOSSES_OF_MEANS[loss.loss_mode]}, but "
                f"actor.loss_agg_mode is {mode}; set actor.loss_agg_mode={MEAN_OF_MEANS}"
            )
        if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
            raise UserError(
                f"actor.policy_loss.clip_cov_lb={loss.clip_cov_lb:g} is not below clip_cov_ub={loss.clip_cov_ub:g}, so "
                "clip_cov would exclude no token; set clip_cov_lb below clip_cov_ub"
            )

    def check_micro_batches(self, num_samples: int, micro_batch_size: int) -> None:
        """Require one micro-batch per rank and update if the loss compares samples.

        Args:
            num_samples: samples per rank and update.
            micro_batch_size: `data.micro_batch_size_per_gpu`.
        """
        mode = self.policy_loss.loss_mode
        if mode in LOSSES_OF_COVARIANCES and micro_batch_size < num_samples:
            raise UserError(
                f"actor.policy_loss.loss_mode={mode} picks tokens by covariances over a micro-batch, so the gradient "
                f"would depend on data.micro_batch_size_per_gpu={micro_batch_size}, which is less than a rank's "
                f"{num_samples} samples of an update; set data.micro_batch_size_per_gpu={num_samples}, reduce "
                "actor.ppo_mini_batch_size or rollout.n, or choose another loss"
            )


@dataclass(kw_only=True)
class GroupConfig:
    """`rollout`: the samples of a prompt."""

    n: int = setting(5, "Samples per prompt", ge=2)


@dataclass(kw_only=True)
class RolloutConfig(GroupConfig):
    """`rollout` of language models: generation."""

    engine: Literal["vllm", "hf"] = setting("vllm", "hf generates with transformers")
    n: int = setting(8, "Samples per prompt", ge=2)
    temperature: float = setting(1.0, "Sampling temperature", ge=1e-3, le=100)
    top_p: float = setting(1.0, "Nucleus sampling threshold", ge=1e-6, le=1)
    top_k: int = setting(-1, "Most likely tokens to sample from; -1: all", ge=-1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = setting(
        "auto", "dtype of vLLM's weights; auto: bfloat16 or, before Ampere, float16; float32 on CPUs", needs=VLLM
    )
    max_num_seqs: int = setting(256, "Concurrent completions per engine", ge=1)
    tensor_model_parallel_size: int = setting(1, "Ranks per vLLM engine", ge=1, needs=VLLM)
    gpu_memory_utilization: float = setting(0.5, "Fraction of GPU memory for vLLM", ge=0.01, le=1, needs=VLLM)
    free_cache_engine: bool = setting(True, "Free vLLM's GPU memory during updates", needs=VLLM)
    update_weights_bucket_megabytes: int = setting(
        512, "Bucket size of a weight sync, in MB; capped at 4 MB on CPUs", ge=1, needs=VLLM
    )
    vllm: dict[str, Any] = setting({}, "Arguments of vllm.LLM", needs=VLLM)

    def check(self) -> None:
        """Refuse arguments of vLLM that the engine would override."""
        for name in self.vllm:
            if name in OWN_VLLM_ARGUMENTS:
                raise UserError(f"rollout.vllm.{name} is set elsewhere; {OWN_VLLM_ARGUMENTS[name]}")

    def check_device(self, on_gpu: bool) -> None:
        """Refuse engines of several ranks on CPUs."""
        if self.engine == "vllm" and self.tensor_model_parallel_size > 1 and not on_gpu:
            raise UserError("rollout.tensor_model_parallel_size above 1 needs GPUs; leave it at 1 on CPUs")

    def bucket_bytes(self, on_cpu: bool) -> int:
        """Return the maximum bytes of weights in transit to the engine."""
        megabytes = self.update_weights_bucket_megabytes
        return (min(megabytes, CPU_BUCKET_MB) if on_cpu else megabytes) * 2**20


@dataclass(kw_only=True)
class RewardConfig:
    """`reward`: the reward functions and the judge."""

    functions: list[str] = setting(
        ["reward_correct"], "NAME, path.py:function or package.module:function, with optional *WEIGHT"
    )
    time_limit_s: float = setting(
        10.0, "Seconds per call of a path.py:function; package.module:function has no limit", ge=1e-3
    )
    length_buffer: int = setting(
        64, "Tokens before the length limit over which length_penalty falls from 0 to -1", ge=1
    )
    num_workers: int | None = setting(None, "Concurrent calls per rank; null: the rank's share of the cores", ge=1)
    isolation: Literal["auto", "bwrap", "sandlock", "rlimits"] = setting("auto", "Sandbox; auto: bwrap, else sandlock")
    packages: list[str] = setting(["numpy"], "Packages that programs can import")
    cpu_s: float = setting(5.0, "CPU seconds per test", ge=1e-3)
    wall_s: float = setting(20.0, "Wall-clock seconds per test", ge=1e-3)
    memory_mb: int = setting(1024, "Memory limit of a program's processes", ge=16)

    def check(self) -> None:
        """Refuse an empty list of reward functions."""
        if not self.functions:
            raise UserError("reward.functions is empty; specify a reward function, or path.py:function")
