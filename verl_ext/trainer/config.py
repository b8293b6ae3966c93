"""The configuration that all stages share. Key names are verl's where verl has the key."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from verl_ext.checkpoint.config import CheckpointConfig, ExportConfig
from verl_ext.config.recipes import default_recipe
from verl_ext.config.schema import section, setting, unused
from verl_ext.errors import UserError

_DEVICE = re.compile(r"\d+|(GPU|MIG)-[\w/-]+", re.ASCII)
Attention = Literal["auto", "flash_attention_2", "sdpa", "eager"]
Device = Literal["auto", "cuda", "npu", "cpu"]
Schedule = Literal["cosine", "wsd", "constant"]
BYTES_OF_GRADIENT = 4
"""Bytes of a gradient element before its reduction; micro-batches are summed in fp32."""
GATHERED_SHARE = 0.15
"""Maximum fraction of a rank's memory for full weights and gradients with `keep_gathered=auto`."""
CHUNK_ELEMENTS = {"cpu": 1 << 24, "gpu": 1 << 28}
"""Logits per chunk of the fused loss; on a CPU 64 MiB in fp32, if that is at least `MIN_CHUNK_TOKENS`."""
MIN_CHUNK_TOKENS = 128
"""Minimum tokens per chunk of logits; matrix products of fewer rows are slow."""
FUSED_OPTIMIZERS = ("Adam", "AdamW")
"""Classes of torch.optim whose fused GPU kernel supports FSDP2's DTensors; SGD's does not."""
NEW_LORA = ("model.lora_rank",)
"""What settings of new adapters need to have an effect, see `Setting.needs`; given adapters have their own."""


def chunk_tokens(vocab_size: int, on_gpu: bool) -> int:
    """Return the number of tokens per chunk of the fused loss."""
    return max(MIN_CHUNK_TOKENS, CHUNK_ELEMENTS["gpu" if on_gpu else "cpu"] // vocab_size)


@dataclass(kw_only=True)
class WrapPolicyConfig:
    """`model.fsdp_config.wrap_policy`: which modules FSDP2 shards separately."""

    min_num_params: int = unused(0, "FSDP2 shards by layer class")
    transformer_layer_cls_to_wrap: str | list[str] | None = setting(
        None, "Layer classes to shard; null uses the model's"
    )


@dataclass(kw_only=True)
class UnusedWrapPolicyConfig(WrapPolicyConfig):
    """`model.fsdp_config.wrap_policy` of a model without layers to shard separately."""

    transformer_layer_cls_to_wrap: str | list[str] | None = unused(None, "the controller is sharded as a whole")


@dataclass(kw_only=True)
class FSDPConfig:
    """`model.fsdp_config`."""

    model_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", "dtype of the master weights; fp16 is too narrow for the state of Adam"
    )
    wrap_policy: WrapPolicyConfig = section(WrapPolicyConfig)
    cpu_offload: bool = setting(False, "Keep parameters and optimizer state in CPU memory")
    offload_params: bool = unused(False, "set model.fsdp_config.cpu_offload")


@dataclass(kw_only=True)
class GatheringFSDPConfig(FSDPConfig):
    """`model.fsdp_config` of stages that train a sharded model on several micro-batches per update."""

    keep_gathered: Literal["auto"] | bool = setting(
        "auto", "Gather weights and reduce gradients once per update; auto: if both fit in 15% of memory"
    )


@dataclass(kw_only=True)
class ModelConfig:
    """`model`: the model to load, and how it runs."""

    partial_pretrain: str | None = setting(None, "Initial model: directory or Hub name")
    use_shm: bool = setting(False, "Load the model through shared memory")
    fsdp_config: FSDPConfig = section(FSDPConfig)
    external_lib: str | None = setting(
        None, "Python module to import before the model is loaded, such as one that registers its architecture"
    )
    enable_gradient_checkpointing: bool = setting(True, "Recompute activations to save memory")
    trust_remote_code: bool = setting(False, "Run the model's own code")
    lora_rank: int = setting(
        0, "Rank of new LoRA adapters; 0 trains the full model", ge=0, needs=("model.lora_adapter_path=null",)
    )
    lora_alpha: int = setting(16, "LoRA alpha; adapters are scaled by `lora_alpha` / `lora_rank`", needs=NEW_LORA)
    lora_adapter_path: str | None = setting(
        None, "Directory of LoRA adapters to train further, with their own settings", path=True
    )
    target_modules: str | list[str] = setting("all-linear", "Modules with new LoRA adapters", needs=NEW_LORA)
    use_liger: bool = setting(False, "Use Liger kernels; on GPUs also for `fused_loss`")
    strategy: str = setting("fsdp2", "Sharding strategy; only fsdp2")
    attn_implementation: Attention = setting(
        "auto",
        "Attention kernel; auto: flash-attention if installed, in bf16 on GPUs; else sdpa; eager if the model needs it",
    )
    mixed_precision: Literal["auto", "bf16", "fp32"] = setting(
        "auto", "dtype of the forward pass; auto: bf16 where supported, but on CPUs fp32 except in the stage sft"
    )

    @property
    def uses_lora(self) -> bool:
        """Whether LoRA adapters are trained instead of the full model."""
        return self.lora_adapter_path is not None or self.lora_rank > 0

    def check(self) -> None:
        """Refuse sharding strategies other than FSDP2, and flash-attention in fp32."""
        if self.strategy != "fsdp2":
            raise UserError(
                f"model.strategy is '{self.strategy}', but this trainer shards with fsdp2; set it to fsdp2, which "
                "resumes from checkpoints of either"
            )
        if self.attn_implementation == "flash_attention_2" and self.mixed_precision == "fp32":
            raise UserError(
                "model.attn_implementation=flash_attention_2 does not support fp32; set model.mixed_precision=bf16"
            )


@dataclass(kw_only=True)
class SFTModelConfig(ModelConfig):
    """`model` of SFT."""

    partial_pretrain: str = setting("~/models/gemma-1.1-7b-it", "Initial model: directory or Hub name")
    fsdp_config: GatheringFSDPConfig = section(GatheringFSDPConfig)
    fused_loss: bool = setting(True, "Compute the loss in chunks, without all logits")
    compile: bool = setting(False, "torch.compile each block; slows down the first steps")


@dataclass(kw_only=True)
class RewardModelConfig(ModelConfig):
    """`model` of stages that learn from rewards."""

    sft_run: str | None = setting(
        None,
        "SFT run to start from: its best checkpoint if evaluated, else its newest export (budget: its newest export)",
    )


@dataclass(kw_only=True)
class GRPOModelConfig(RewardModelConfig):
    """`model` of GRPO."""

    fsdp_config: GatheringFSDPConfig = section(GatheringFSDPConfig)


@dataclass(kw_only=True)
class VLMConfig(ModelConfig):
    """`model` of stages with a vision-language model."""

    enable_gradient_checkpointing: bool = unused(False, "vision-language models keep their activations")
    lora_rank: int = unused(0, "vision-language models are trained in full")
    lora_alpha: int = unused(16, "vision-language models are trained in full")
    lora_adapter_path: str | None = unused(None, "vision-language models are trained in full")
    target_modules: str | list[str] = unused("all-linear", "vision-language models are trained in full")
    use_liger: bool = unused(False, "Liger kernels are for language models")


@dataclass(kw_only=True)
class VLMSFTModelConfig(VLMConfig):
    """`model` of SFT of a vision-language model."""

    fsdp_config: GatheringFSDPConfig = section(GatheringFSDPConfig)
    fused_loss: bool = setting(True, "Compute the loss in chunks, without all logits")


@dataclass(kw_only=True)
class ControllerFSDPConfig(FSDPConfig):
    """`model.fsdp_config` of the budget controller's GRPO."""

    model_dtype: Literal["fp32", "bf16"] = unused("fp32", "the controller is trained in fp32")
    wrap_policy: UnusedWrapPolicyConfig = section(UnusedWrapPolicyConfig)


@dataclass(kw_only=True)
class BudgetModelConfig(VLMConfig, RewardModelConfig):
    """`model` of the budget controller's GRPO: the frozen vision-language model."""

    fsdp_config: ControllerFSDPConfig = section(ControllerFSDPConfig)
    attn_implementation: Attention = unused("auto", "the vision-language model uses its own")
    external_lib: str | None = unused(None, "set model.adapter for a custom architecture")
    adapter: str | None = setting(None, "VLMAdapter, path.py:CLASS or package.module:CLASS; null: by model type")
    mixed_precision: Literal["auto", "bf16", "fp32"] = unused(
        "fp32", "the controller is trained in fp32; set controller.dtype for the vision-language model"
    )


@dataclass(kw_only=True)
class OptimConfig:
    """`optim`: the optimizer and its learning-rate schedule."""

    optimizer: str = setting("AdamW", "Optimizer class")
    optimizer_impl: str = setting("torch.optim", "Module of the optimizer class")
    lr: float = setting(1e-5, "Peak learning rate (budget: initial)", ge=0)
    betas: list[float] = setting([0.9, 0.95], "Adam betas", ge=0, lt=1)
    weight_decay: float = setting(0.01, "Weight decay of all trainable parameters, norms and biases too", ge=0)
    clip_grad: float = setting(1.0, "Maximum gradient norm; inf disables clipping", ge=1e-12, finite=False)
    lr_scheduler: Schedule = setting("cosine", "Schedule after warmup")
    lr_warmup_steps_ratio: float = setting(0.1, "Warmup, as a fraction of the schedule", ge=0, le=1)
    lr_warmup_steps: int | None = setting(-1, "Warmup steps; ≥0 overrides the ratio", ge=-1)
    min_lr_ratio: float | None = setting(0.0, "Final learning rate, as a fraction of the peak", ge=0, le=1)
    num_cycles: float = setting(0.5, "Cosine cycles; 0.5 ends at the minimum", ge=0)
    total_training_steps: int = setting(-1, "Steps of the schedule; -1: all epochs, or the run if longer")
    override_optimizer_config: dict[str, Any] | None = setting(None, "Further arguments of the optimizer class")
    lr_scheduler_type: str = unused("constant", "set optim.lr_scheduler")
    warmup_style: str | None = unused(None, "set optim.lr_scheduler")
    _target_: str = unused("verl.workers.config.FSDPOptimizerConfig", "set optim.optimizer and optim.optimizer_impl")

    @property
    def class_name(self) -> str:
        """The optimizer's class with its module, as in a checkpoint's manifest."""
        return f"{self.optimizer_impl}.{self.optimizer}"

    @property
    def runs_fused_on_gpus(self) -> bool:
        """Whether GPUs use torch's fused kernel: the class has one, and the configuration selects no other."""
        asked = self.override_optimizer_config or {}
        has_kernel = self.optimizer_impl == "torch.optim" and self.optimizer in FUSED_OPTIMIZERS
        return has_kernel and not {"fused", "foreach", "differentiable"} & asked.keys()

    def check(self) -> None:
        """Refuse `betas` other than two numbers."""
        if len(self.betas) != 2:
            raise UserError(
                f"optim.betas is {self.betas}; it must be two numbers from 0 to below 1, such as [0.9, 0.95]"
            )


@dataclass(kw_only=True)
class PlateauOptimConfig(OptimConfig):
    """`optim` of the budget controller's GRPO, whose learning rate falls when the reward stops rising."""

    lr: float = setting(1e-4, "Peak learning rate (budget: initial)", ge=0)
    betas: list[float] = setting([0.9, 0.999], "Adam betas", ge=0, lt=1)
    weight_decay: float = setting(1e-5, "Weight decay of all trainable parameters, norms and biases too", ge=0)
    lr_scheduler: Schedule = unused("constant", "set optim.plateau_factor and optim.plateau_patience")
    lr_warmup_steps_ratio: float = unused(0.0, "the learning rate falls on a plateau")
    lr_warmup_steps: int = unused(-1, "the learning rate falls on a plateau")
    min_lr_ratio: float = unused(0.0, "the learning rate falls on a plateau")
    num_cycles: float = unused(0.5, "the learning rate falls on a plateau")
    total_training_steps: int = unused(-1, "the learning rate falls on a plateau")
    plateau_factor: float = setting(0.5, "Learning-rate factor on a plateau", ge=1e-6, le=1 - 1e-6)
    plateau_patience: int = setting(5, "Epochs without improvement; after one more, plateau_factor applies", ge=0)


@dataclass(kw_only=True)
class PreemptionConfig:
    """`trainer.preemption`: how the run reacts to preemption."""

    grace_s: float = setting(
        120.0, "Seconds to end the step and save after a signal, before the ranks are killed", gt=0
    )
    deadline: float | str | None = setting(None, "Time of preemption, in Unix seconds or ISO 8601")

    def check(self) -> None:
        """Refuse a deadline that is not a time."""
        parse_deadline(self.deadline)

    def check_deadline_ahead(self) -> None:
        """Refuse a deadline in the past."""
        deadline = parse_deadline(self.deadline)
        if deadline is not None and deadline <= time.time():
            raise UserError(
                f"trainer.preemption.deadline is {self.deadline}, which is in the past; set it to the time at which "
                "this machine is preempted, or null"
            )


def parse_deadline(value: object) -> float | None:
    """Read a value of `trainer.preemption.deadline`.

    Args:
        value: None, seconds since 1970 (a number, or text of one), or ISO 8601 text with a time zone.

    Returns:
        Seconds since 1970; None for None.

    Raises:
        UserError: the value is anything else.
    """
    if value is None:
        return None
    seconds = to_seconds(value)
    if seconds is None:
        raise UserError(
            f"trainer.preemption.deadline is {value!r}; set it to seconds since 1970, or to a time with its zone "
            "such as 2030-01-31T18:00:00+01:00"
        )
    return seconds


def to_seconds(value: object) -> float | None:
    """Convert a number, its text, or ISO 8601 text with a time zone to seconds since 1970; else return None."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
        return seconds if math.isfinite(seconds) else None
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(str(value).strip().upper())  # accepts Z, but not z
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None


@dataclass(kw_only=True)
class TrainerConfig:
    """`trainer`: the run itself."""

    default_local_dir: str = setting(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "Run directory", nonempty=True, path=True
    )
    default_hdfs_dir: str | None = unused(None, "mount the file system and set trainer.default_local_dir")
    project_name: str = setting("gsm8k-sft", "Project name in paths and trackers", nonempty=True)
    experiment_name: str = setting("test", "Run name in paths and trackers", nonempty=True)
    total_epochs: int = setting(4, "Passes over the data", ge=1)
    total_training_steps: int | None = setting(
        None, "Step at which the run ends; lengthens the schedule only beyond all epochs", ge=1, null="all epochs"
    )
    logger: list[str] = setting(["console", "wandb"], "Backends of verl's Tracking, such as tensorboard")
    wandb_proxy: str | None = setting(None, "HTTPS proxy for W&B", nonempty=True, null="HTTPS_PROXY, if it is set")
    seed: int = setting(42, "Seed of initialization, dropout and data order", ge=0, le=2**31 - 1)
    save_freq: int = setting(
        -1,
        "Steps between checkpoints; the last step (budget: of each epoch) and a stopped run also save; -1: only those",
    )
    test_freq: int = setting(
        -1, "Steps between validations; the last step (budget: of each epoch) validates too; -1: only that"
    )
    nnodes: int = setting(1, "Nodes; set by NNODES")
    n_gpus_per_node: int = setting(8, "Ranks per node; set by the first argument")
    max_ckpt_to_keep: int | None = setting(
        None, "Newest checkpoints to keep, besides the best, the selected and the protected ones", ge=1, null="all"
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = setting(
        "auto", "auto: the newest checkpoint; disable: step 0; resume_path: resume_from_path"
    )
    resume_from_path: str | None = setting(
        None,
        "global_step_N to start from; with auto, the run's newer checkpoint takes precedence",
        path=True,
    )
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    device: Device = setting("auto", "Device; to use the CPUs of a GPU machine, set CUDA_VISIBLE_DEVICES=''")
    log_every: int = setting(10, "Steps between console lines", ge=1)
    val_before_train: bool = setting(True, "Validate before the first step")
    max_nonfinite_steps: int = setting(
        3, "Consecutive steps with a non-finite loss or gradient that stop the run", ge=1
    )
    trace: bool = setting(False, "Write timelines for Perfetto; set by --trace")
    preemption: PreemptionConfig = section(PreemptionConfig)

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return Path(self.default_local_dir)

    def check(self) -> None:
        """Refuse contradictory settings of saves, exports and resuming."""
        every = self.checkpoint.export.every
        if every is not None and (self.save_freq < 1 or every % self.save_freq):
            multiple = f"set it to a multiple, such as {self.save_freq}"
            fix = f"set trainer.save_freq={every}" if self.save_freq < 1 else multiple
            raise UserError(
                f"trainer.checkpoint.export.every is {every}, which is not a multiple of trainer.save_freq="
                f"{self.save_freq}; {fix}"
            )
        if self.resume_mode == "resume_path" and self.resume_from_path is None:
            raise UserError(
                "trainer.resume_mode=resume_path has no path; set trainer.resume_from_path=.../global_step_N"
            )


@dataclass(kw_only=True)
class SFTTrainerConfig(TrainerConfig):
    """`trainer` of SFT."""

    deterministic: bool = setting(False, "Deterministic kernels: bitwise repeatable on GPUs, but slower")


@dataclass(kw_only=True)
class RewardTrainerConfig(TrainerConfig):
    """`trainer` of stages that learn from rewards."""

    test_freq: int = setting(
        "${data.eval_every_steps}",
        "Steps between validations; the last step (budget: of each epoch) validates too; -1: only that",
    )
    log_samples_every: int = setting(
        10, "Steps between training samples in samples.jsonl; 0 also omits evaluation samples", ge=1, also=(0, "never")
    )
    samples_per_table: int = setting(8, "Samples to write each time; in training, rounded up to complete groups", ge=1)


@dataclass(kw_only=True)
class TokenTrainerConfig(RewardTrainerConfig):
    """`trainer` of GRPO of language models."""

    log_sample_tokens: bool = setting(False, "Also write tokens and log-probabilities of training samples")
    checkpoint: CheckpointConfig = section(
        CheckpointConfig, best_metric="train/reward_total_mean", best_mode="max", export=ExportConfig(dtype="auto")
    )


@dataclass(kw_only=True)
class BudgetTrainerConfig(RewardTrainerConfig):
    """`trainer` of the budget controller's GRPO."""

    checkpoint: CheckpointConfig = section(
        CheckpointConfig, best_metric="eval/reward_total_mean", best_mode="max", export=ExportConfig(dtype="fp32")
    )


@dataclass(kw_only=True)
class WatchConfig:
    """`eval`: the evaluation of the run's checkpoints."""

    recipe: str | None = setting(None, "Recipe in recipes/eval/ or a file; null: the default recipe", nonempty=True)
    watch: bool = setting(False, "Evaluate checkpoints during training")
    devices: int | str | list[int | str] | None = setting(
        None, "GPUs for eval.watch, such as [6,7]; required if GPUs are visible"
    )

    @property
    def recipe_name(self) -> str:
        """Name or file of the recipe."""
        return self.recipe or default_recipe("eval")

    @property
    def device_names(self) -> list[str] | None:
        """`devices` as names for `CUDA_VISIBLE_DEVICES`; None if it is null.

        Raises:
            UserError: `devices` is empty, repeats a GPU, or names something else.
        """
        if self.devices is None:
            return None
        items = self.devices if isinstance(self.devices, list) else str(self.devices).split(",")
        names = [self._device_name(item) for item in items]
        if not names or len(set(names)) < len(names):
            raise UserError(
                f"eval.devices is {self.devices!r}; it must name at least one GPU, and each only once, or be null"
            )
        return names

    def _device_name(self, item: int | str) -> str:
        name = str(item).strip()
        if not _DEVICE.fullmatch(name):
            raise UserError(
                f"eval.devices is {self.devices!r}; specify GPUs by number or by id as nvidia-smi -L lists them, such "
                "as 7, [6,7] or GPU-5a1b2c3d"
            )
        return str(int(name)) if name.isdecimal() else name

    def check(self) -> None:
        """Refuse devices that are not GPUs."""
        _ = self.device_names


@dataclass(kw_only=True)
class VLMWatchConfig(WatchConfig):
    """`eval` of stages with a vision-language model, which other commands evaluate."""

    watch: bool = unused(False, "`bash eval_pipeline/run.sh` evaluates language models")
    devices: int | str | list[int | str] | None = unused(None, "`bash eval_pipeline/run.sh` evaluates language models")


@dataclass(kw_only=True)
class BudgetWatchConfig(VLMWatchConfig):
    """`eval` of the budget controller's GRPO."""

    recipe: str | None = unused(None, "`bash eval_pipeline/run.sh adaptive` evaluates a controller")
