"""The workload of one rank in a step: number and size of its micro-batches, dtypes, and switches."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from verl_ext.config.schema import value_at
from verl_ext.errors import UserError
from verl_ext.trainer.config import BYTES_OF_GRADIENT, GATHERED_SHARE
from verl_ext.trainer.stages import GRPOConfig, RunConfig, SFTConfig

PlannedConfig = SFTConfig | GRPOConfig
"""Stages with formulas."""
DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
CACHE_DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of an element of vLLM's cache; `auto` has those of the engine's weights."""
UNSUPPORTED = {"model.fsdp_config.cpu_offload": False, "ulysses_sequence_parallel_size": 1}
"""Keys without formulas, and their only supported values."""
PLANNED_OPTIMIZERS = ("torch.optim.Adam", "torch.optim.AdamW")
"""Optimizers with formulas, which have two moments per parameter, or three with `amsgrad`."""
SEE_SUPPORTED = "see docs/guides/planning.md#accuracy"
Attention = Literal["flash", "causal", "masked", "packed", "eager"]
"""flash-attention; sdpa with its causal kernel; sdpa with a full mask, for rows of unequal length; sdpa per sample over
packed rows; or eager, which keeps the attention scores."""


@dataclass(frozen=True)
class DeviceSpec:
    """A GPU or CPU core; GPUs use NCCL, bf16 and multi-tensor optimizers.

    Attributes:
        memory_bytes: memory of a rank.
        library_bytes: memory for libraries and their buffers.
        kept_share: memory that the allocator keeps for later, relative to activations and logits.
    """

    memory_bytes: float
    is_gpu: bool
    library_bytes: float = 0.0
    kept_share: float = 0.0


@dataclass(frozen=True)
class LargestMicroBatch:
    """The micro-batch of a rank that determines memory.

    Attributes:
        rows: number of rows.
        row_tokens: tokens per row, including padding.
        logit_tokens: tokens that have logits.
        loss_tokens: tokens in the loss.
        attention: the attention kernel.
        num_micro_batches: number of micro-batches per rank and update.
    """

    rows: int
    row_tokens: int
    logit_tokens: int
    loss_tokens: int
    attention: Attention
    num_micro_batches: int


@dataclass(frozen=True)
class DataLengths:
    """Properties of data that a configuration does not determine.

    Attributes:
        mean: mean tokens per sample; None uses the maximum.
        loss_fraction: fraction of a sample's tokens that are in the loss.
        are_equal: whether all samples have the same length, so that nothing is padded.
        largest: returns the largest micro-batch of known data; None assumes samples of maximum length.
    """

    mean: float | None = None
    loss_fraction: float = 1.0
    are_equal: bool = False
    largest: Callable[[PlannedConfig], LargestMicroBatch] | None = None


@dataclass(frozen=True)
class RankWorkload:
    """The workload of one rank in a step.

    Attributes:
        is_grpo: whether completions are generated first.
        samples: number of sequences in a step, over all ranks.
        tokens_per_sample: mean length, which determines time.
        rows: rows of the largest micro-batch, which determines memory.
        num_micro_batches: number of micro-batches per rank and update.
        num_updates: number of updates, in all passes over the samples.
        num_epochs: number of passes over the samples, `actor.ppo_epochs`.
        logit_tokens: tokens of the largest micro-batch that have logits.
        loss_tokens: tokens of the largest micro-batch that are in the loss.
        forward_passes: number of forward passes without backward over all samples, for GRPO's old log-probabilities.
        master_bytes: bytes of a stored weight.
        compute_bytes: bytes of an element in the forward pass.
        reduce_bytes: bytes of a gradient in a reduction.
        engine_bytes: bytes of a weight in the rollout engine; 0 without one.
        cache_bytes: bytes of an element of its cache of keys and values.
        compiled: whether torch.compile compiles the layers.
        fused_loss: whether the loss and its gradients are computed chunk by chunk.
        keeps_gathered: whether weights stay gathered, and gradients whole, until the last micro-batch of an update.
        optimizer_implementation: for-loop, foreach or fused, as in `torch.optim`.
        num_moments: number of moments of the optimizer: two, or three with `amsgrad`, which keeps the maximum of the
            second.
    """

    is_grpo: bool
    samples: int
    tokens_per_sample: float
    rows: int
    row_tokens: int
    num_micro_batches: int
    num_updates: int
    num_epochs: int
    logit_tokens: int
    loss_tokens: int
    forward_passes: int
    attention: Attention
    master_bytes: int
    compute_bytes: int
    reduce_bytes: int
    engine_bytes: int
    cache_bytes: int
    checkpointing: bool
    compiled: bool
    fused_loss: bool
    keeps_gathered: bool
    optimizer_implementation: str
    num_moments: int

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch, including padding."""
        return self.rows * self.row_tokens


def workload_of(
    config: PlannedConfig, numel: int, num_trained: int, num_ranks: int, device: DeviceSpec, lengths: DataLengths
) -> RankWorkload:
    """Return the workload of a resolved configuration.

    Args:
        numel: number of parameters of its model.
        num_trained: number of those that are not frozen.
        num_ranks: number of ranks that share a step.
        device: device of each rank; determines the meaning of `auto`.

    Raises:
        UserError: a launch refuses the batch or the engine on these ranks, or the plan has no formulas for a setting.
    """
    require_formulas(config).check_ranks(num_ranks)
    longest = longest_sample(config)
    mean = lengths.mean or longest
    if mean > longest:
        raise UserError(f"mean_length={mean:g} is more than the longest sample of {longest} tokens; lower it")
    master, compute, reduce = number_bytes(config, device)
    samples, num_epochs, engine_bytes, fused_loss = config.data.train_batch_size, 1, 0, False
    if isinstance(config, GRPOConfig):
        config.rollout.check_device(device.is_gpu)
        samples *= config.rollout.n
        num_epochs = config.actor.ppo_epochs
        engine_bytes = compute  # transformers generates with the trained weights
        if config.rollout.engine == "vllm":
            engine_bytes = DTYPE_BYTES.get(config.rollout.dtype, 2 if device.is_gpu else 4)  # auto has no entry
    else:
        fused_loss = config.model.fused_loss
    if lengths.largest is None:
        by_flash = device.is_gpu and compute < DTYPE_BYTES["float32"]
        largest = longest_micro_batch(config, samples_per_update(config, num_ranks), lengths, by_flash)
    else:
        largest = lengths.largest(config)
    return RankWorkload(
        is_grpo=isinstance(config, GRPOConfig),
        samples=samples,
        tokens_per_sample=mean,
        **vars(largest),
        num_updates=config.updates_per_step,
        num_epochs=num_epochs,
        forward_passes=int(config.updates_per_step > 1),  # SFT has one update
        master_bytes=master,
        compute_bytes=compute,
        reduce_bytes=reduce,
        engine_bytes=engine_bytes,
        cache_bytes=CACHE_DTYPE_BYTES.get(cache_dtype(config), engine_bytes),
        checkpointing=config.model.enable_gradient_checkpointing,
        compiled=isinstance(config, SFTConfig) and config.model.compile,
        fused_loss=fused_loss,
        keeps_gathered=keeps_gathered(config, numel * compute + num_trained * BYTES_OF_GRADIENT, device),
        optimizer_implementation=optimizer_implementation(config, device),
        num_moments=3 if (config.optim.override_optimizer_config or {}).get("amsgrad") else 2,
    )


def require_formulas(config: RunConfig) -> PlannedConfig:
    """Return the configuration if the plan has formulas for it.

    Raises:
        UserError: the plan has no formulas for its stage, its optimizer or another setting.
    """
    if not isinstance(config, SFTConfig | GRPOConfig):
        raise UserError(f"the planner does not support the stage {config.stage}; {SEE_SUPPORTED}")
    for key, supported in UNSUPPORTED.items():
        value = value_at(config, key)
        if value not in (None, supported):
            given, fixed = (str(each).lower() for each in (value, supported))
            raise UserError(f"the planner does not support {key}={given}; plan with {key}={fixed}")
    if config.optim.class_name not in PLANNED_OPTIMIZERS:
        raise UserError(
            f"the planner does not support the optimizer {config.optim.class_name}; plan with optim.optimizer=AdamW "
            "and optim.optimizer_impl=torch.optim"
        )
    if isinstance(config, GRPOConfig) and config.actor.use_kl_loss:
        raise UserError("the planner does not support actor.use_kl_loss=true; plan with actor.use_kl_loss=false")
    if cache_dtype(config) not in ("auto", *CACHE_DTYPE_BYTES):
        raise UserError(
            f"the planner does not support rollout.vllm.kv_cache_dtype={cache_dtype(config)}; plan with "
            "rollout.vllm.kv_cache_dtype=auto"
        )
    return config


def cache_dtype(config: PlannedConfig) -> str:
    """Return the dtype of vLLM's cache of keys and values; `auto` without vLLM."""
    if not isinstance(config, GRPOConfig) or config.rollout.engine != "vllm":
        return "auto"
    return str(config.rollout.vllm.get("kv_cache_dtype", "auto"))


def ignored_settings(config: PlannedConfig) -> list[str]:
    """Return the settings for which the plan has no formulas, although they may change memory or time."""
    if not isinstance(config, GRPOConfig) or config.rollout.engine != "vllm":
        return []
    return [f"rollout.vllm.{name}" for name in config.rollout.vllm if name != "kv_cache_dtype"]


# Samples and micro-batches


def longest_sample(config: PlannedConfig) -> int:
    """Return the maximum tokens per sample that the configuration allows."""
    if isinstance(config, GRPOConfig):
        return config.data.max_prompt_length + config.data.max_response_length
    return config.data.max_length


def samples_per_update(config: PlannedConfig, num_ranks: int) -> int:
    """Return the number of samples per rank and update, which `check_ranks` has checked."""
    size, group_size = config.data.train_batch_size, 1
    if isinstance(config, GRPOConfig):
        size, group_size = config.actor.ppo_mini_batch_size or size, config.rollout.n
    return size // num_ranks * group_size


def token_budget(config: PlannedConfig) -> int | None:
    """Return `data.max_tokens_per_gpu`, which only SFT has."""
    return config.data.max_tokens_per_gpu if isinstance(config, SFTConfig) else None


def packs(config: PlannedConfig) -> bool:
    """Whether samples share a row. Training also tests whether the model supports this, which the plan cannot."""
    return isinstance(config, SFTConfig) and config.packs_samples and config.model.attn_implementation != "eager"


def micro_batches(config: PlannedConfig, samples: int, mean: float) -> tuple[int, int, int]:
    """Return the rows of the largest micro-batch, tokens per row, and the number of micro-batches of a rank.

    A micro-batch holds as many whole samples as its budget allows, but at least one. Packed samples form one row, whose
    default budget is `micro_batch_size_per_gpu` samples of maximum length. Otherwise, the largest micro-batch has rows
    of maximum length.
    """
    budget, longest = token_budget(config), longest_sample(config)
    size = min(config.data.micro_batch_size_per_gpu, samples)
    if budget is None and not packs(config):
        return size, longest, math.ceil(samples / size)
    budget = max(budget or size * longest, longest)
    count = math.ceil(samples * mean / budget)
    if packs(config):
        return 1, min(budget, samples * longest), count
    return min(budget // longest, samples), longest, count


def longest_micro_batch(config: PlannedConfig, samples: int, lengths: DataLengths, by_flash: bool) -> LargestMicroBatch:
    """Return the largest micro-batch of samples of maximum length.

    Args:
        samples: samples of a rank's update.
        by_flash: see `attention_of`.
    """
    rows, row_tokens, num_micro_batches = micro_batches(config, samples, lengths.mean or longest_sample(config))
    if isinstance(config, GRPOConfig):
        logit_tokens = loss_tokens = rows * config.data.max_response_length
    else:
        logit_tokens = rows * row_tokens
        loss_tokens = round(logit_tokens * lengths.loss_fraction)
    attention = attention_of(config, is_padded=rows > 1 and not lengths.are_equal, by_flash=by_flash)
    return LargestMicroBatch(rows, row_tokens, logit_tokens, loss_tokens, attention, num_micro_batches)


# Switches and dtypes


def attention_of(config: PlannedConfig, is_padded: bool, by_flash: bool) -> Attention:
    """Return the attention kernel.

    Args:
        is_padded: whether rows of unequal length share a micro-batch.
        by_flash: whether the device and dtype have a kernel for samples of different lengths.
    """
    implementation = config.model.attn_implementation
    if implementation == "flash_attention_2":
        return "flash"
    if implementation == "eager":
        return "eager"
    if packs(config) or isinstance(config, GRPOConfig):
        return "flash" if by_flash else "packed"
    return "masked" if is_padded else "causal"


def keeps_gathered(config: PlannedConfig, whole_bytes: int, device: DeviceSpec) -> bool:
    """Resolve `model.fsdp_config.keep_gathered`; auto keeps models that need little of the memory, like the trainer."""
    setting = config.model.fsdp_config.keep_gathered
    return whole_bytes <= GATHERED_SHARE * device.memory_bytes if setting == "auto" else bool(setting)


def optimizer_implementation(config: PlannedConfig, device: DeviceSpec) -> str:
    """Return the setting of `optim.override_optimizer_config`; by default fused on GPUs if supported, else for-loop."""
    arguments = config.optim.override_optimizer_config or {}
    if arguments.get("fused", device.is_gpu and config.optim.runs_fused_on_gpus):
        return "fused"
    return "foreach" if arguments.get("foreach") else "for-loop"


def number_bytes(config: PlannedConfig, device: DeviceSpec) -> tuple[int, int, int]:
    """Return the bytes of a stored weight, of an element in the forward pass, and of one in a gradient reduction."""
    master, precision = DTYPE_BYTES[config.model.fsdp_config.model_dtype], config.model.mixed_precision
    if precision == "auto":
        precision = "bf16" if device.is_gpu else "fp32"
    return master, DTYPE_BYTES[precision], DTYPE_BYTES["fp32"]
