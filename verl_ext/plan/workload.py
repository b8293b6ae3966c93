"""What one rank does in a step: how many micro-batches of how many tokens, and with which switches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from verl_ext.config.schema import value_at
from verl_ext.errors import UserError
from verl_ext.plan.hardware import Hardware
from verl_ext.trainer.config import GATHERED_SHARE
from verl_ext.trainer.stages import GRPOConfig, RunConfig, SFTConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
SWITCHES = {
    "data.packing": False,
    "data.max_tokens_per_gpu": None,
    "model.fused_loss": False,
    "model.fsdp_config.keep_gathered": False,
}
"""Keys that a configuration may not have, with what their absence means."""
UNKNOWN = {"model.lora_rank": 0, "model.fsdp_config.cpu_offload": False, "ulysses_sequence_parallel_size": 1}
"""Settings that the plan has no formulas for, with the value they must keep."""


@dataclass(frozen=True)
class Workload:
    """A step of one rank.

    Attributes:
        is_grpo: whether completions are drawn first.
        samples: sequences of a step over all ranks.
        tokens_per_sample: mean length; what decides time.
        rows: of the largest micro-batch, and `row_tokens` of each; what decides memory.
        num_micro_batches: of a rank between two updates, and `num_updates` of a step.
        logit_tokens: tokens of the largest micro-batch whose logits are made, `learnt_tokens` of them in the loss.
        is_padded: whether rows of unlike length share a micro-batch; `is_packed`: whether samples share a row.
        forward_passes: over all samples without a backward pass (GRPO's old log-probabilities).
        master_bytes, compute_bytes, reduce_bytes: of a number of the stored weights, of the forward pass, of the
            gradients on their way.
        checkpointing: recompute each layer in the backward pass.
        is_flash: flash-attention, else PyTorch's sdpa; `is_eager`: attention scores are kept.
        fused_loss: logits are made in chunks, and the gradients with them.
        keeps_gathered: weights stay gathered, and gradients whole, until the last micro-batch of an update.
        optimizer_implementation: for-loop, foreach or fused, as in torch's `torch.optim`.
    """

    is_grpo: bool
    samples: int
    tokens_per_sample: float
    rows: int
    row_tokens: int
    num_micro_batches: int
    num_updates: int
    logit_tokens: int
    learnt_tokens: int
    is_padded: bool
    is_packed: bool
    forward_passes: int
    master_bytes: int
    compute_bytes: int
    reduce_bytes: int
    checkpointing: bool
    is_flash: bool
    is_eager: bool
    fused_loss: bool
    keeps_gathered: bool
    optimizer_implementation: str

    @property
    def tokens(self) -> int:
        """Of the largest micro-batch, padding included."""
        return self.rows * self.row_tokens


@dataclass(frozen=True)
class Lengths:
    """What a configuration does not say of its data.

    Attributes:
        mean: tokens of a sample; None takes the longest.
        learnt_share: of a sample's tokens, those in the loss.
        are_equal: whether no two lengths differ, so that nothing is padded.
    """

    mean: float | None = None
    learnt_share: float = 1.0
    are_equal: bool = False


def workload_of(
    config: SFTConfig | GRPOConfig, numel: int, gpus: int, hardware: Hardware, lengths: Lengths
) -> Workload:
    """Read a configuration.

    Args:
        config: resolved, of the stage sft or grpo.
        numel: parameters of its model.
        gpus: ranks.
        hardware: decides what `auto` means.
        lengths: of the data.

    Raises:
        UserError: the batch does not divide over the ranks, or a setting that the plan has no formulas for.
    """
    refuse_unknown(config)
    data, model = config.data, config.model
    num_updates, forward_passes, samples, longest = 1, 0, data.train_batch_size, data.max_length
    if isinstance(config, GRPOConfig):
        num_updates, forward_passes = updates_of(config)
        samples *= config.rollout.n
        longest = config.data.max_prompt_length + config.data.max_response_length
    mean = lengths.mean or longest
    if mean > longest:
        raise UserError(f"mean_length={mean:g} is more than the longest sample of {longest} tokens; lower it")
    mine = samples_between_updates(config, gpus)
    rows, row_tokens, num_micro_batches = micro_batches(config, mine, longest, mean)
    is_grpo = isinstance(config, GRPOConfig)
    logit_tokens = rows * (config.data.max_response_length if isinstance(config, GRPOConfig) else row_tokens)
    master, compute = number_bytes(config, hardware)
    return Workload(
        is_grpo=is_grpo,
        samples=samples,
        tokens_per_sample=mean,
        rows=rows,
        row_tokens=row_tokens,
        num_micro_batches=num_micro_batches,
        num_updates=num_updates,
        logit_tokens=logit_tokens,
        learnt_tokens=logit_tokens if is_grpo else round(logit_tokens * lengths.learnt_share),
        is_padded=rows > 1 and not lengths.are_equal,
        is_packed=packs(config),
        forward_passes=forward_passes,
        master_bytes=master,
        compute_bytes=compute,
        reduce_bytes=master if compute == master else 4,
        checkpointing=model.enable_gradient_checkpointing,
        is_flash=model.attn_implementation == "flash_attention_2",
        is_eager=model.attn_implementation == "eager",
        fused_loss=switch(config, "model.fused_loss"),
        keeps_gathered=keeps_gathered(config, numel * (compute + 4), hardware),
        optimizer_implementation=optimizer_implementation(config, hardware),
    )


def switch(config: SFTConfig | GRPOConfig, key: str) -> Any:
    """A setting that the configuration may not have."""
    value = value_at(config, key)
    return SWITCHES[key] if value is None else value


def packs(config: SFTConfig | GRPOConfig) -> bool:
    """`data.packing`; auto packs, unless attention is eager: whether the model can do so is found out in training."""
    setting = switch(config, "data.packing")
    return config.model.attn_implementation != "eager" if setting == "auto" else bool(setting)


def keeps_gathered(config: SFTConfig | GRPOConfig, whole_bytes: int, hardware: Hardware) -> bool:
    """`model.fsdp_config.keep_gathered`; auto is where it takes little of the memory, as for the trainer."""
    setting = switch(config, "model.fsdp_config.keep_gathered")
    return whole_bytes <= GATHERED_SHARE * hardware.memory_bytes if setting == "auto" else bool(setting)


def optimizer_implementation(config: SFTConfig | GRPOConfig, hardware: Hardware) -> str:
    """What `optim.override_optimizer_config` asks for; otherwise torch takes foreach on GPUs and for-loop on CPUs."""
    asked = config.optim.override_optimizer_config or {}
    if asked.get("fused"):
        return "fused"
    foreach = asked.get("foreach")
    return "foreach" if (hardware.is_gpu if foreach is None else foreach) else "for-loop"


def refuse_unknown(config: RunConfig) -> SFTConfig | GRPOConfig:
    """Refuse what would make the plan wrong; see `workload_of`."""
    if not isinstance(config, SFTConfig | GRPOConfig):
        raise UserError(
            f"the plan knows the stages sft and grpo, not {config.stage}; there is no plan of {config.recipe}"
        )
    for key, known in UNKNOWN.items():
        if value_at(config, key) not in (None, known):
            raise UserError(f"the plan has no formulas for {key}; plan with {key}={str(known).lower()}")
    if isinstance(config, GRPOConfig) and config.actor.use_kl_loss:
        raise UserError("the plan has no formulas for actor.use_kl_loss; plan with actor.use_kl_loss=false")
    return config


def number_bytes(config: SFTConfig | GRPOConfig, hardware: Hardware) -> tuple[int, int]:
    """Bytes of a number of the stored weights and of the forward pass."""
    master, precision = BYTES[config.model.fsdp_config.model_dtype], config.model.mixed_precision
    if precision == "auto":
        precision = "bf16" if hardware.is_gpu else "fp32"
    return master, master if precision == "fp32" else BYTES[precision]


def updates_of(config: GRPOConfig) -> tuple[int, int]:
    """Updates of a GRPO step, and the forward passes over its samples before them (old log-probabilities)."""
    actor = config.actor
    num_mini_batches = config.data.train_batch_size // (actor.ppo_mini_batch_size or config.data.train_batch_size)
    num_updates = num_mini_batches * actor.ppo_epochs
    return num_updates, int(num_updates > 1)


def samples_between_updates(config: SFTConfig | GRPOConfig, gpus: int) -> int:
    """A rank's samples between two updates; see `workload_of` for what is raised."""
    size, group_size = config.data.train_batch_size, 1
    if isinstance(config, GRPOConfig):
        size, group_size = config.actor.ppo_mini_batch_size or size, config.rollout.n
    if size % gpus:
        key = "data.train_batch_size" if size == config.data.train_batch_size else "actor.ppo_mini_batch_size"
        raise UserError(f"{key}={size} does not divide over {gpus} GPUs; set {key}={-(-size // gpus) * gpus}")
    return size // gpus * group_size


def micro_batches(config: SFTConfig | GRPOConfig, samples: int, longest: int, mean: float) -> tuple[int, int, int]:
    """Rows of the largest micro-batch, tokens of each, and how many micro-batches a rank's samples make.

    A micro-batch has as many whole samples as its budget holds, and at least one. Packed samples are one row, with the
    budget of `micro_batch_size_per_gpu` samples of the longest where none is given; else the largest micro-batch has
    rows of the longest.
    """
    budget, is_packed = switch(config, "data.max_tokens_per_gpu"), packs(config)
    size = min(config.data.micro_batch_size_per_gpu, samples)
    if budget is None and not is_packed:
        return size, longest, math.ceil(samples / size)
    budget = max(budget or size * longest, longest)
    count = math.ceil(samples * mean / budget)
    if is_packed:
        return 1, min(budget, samples * longest), count
    return min(budget // longest, samples), longest, count
