"""Refuses values that cannot work, or not together, before torchrun starts."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_ext.errors import UserError

CHOICES = {
    "model.attn_implementation": ("auto", "flash_attention_2", "sdpa", "eager"),
    "model.mixed_precision": ("auto", "bf16", "fp32"),
    "model.fsdp_config.model_dtype": ("fp32", "bf16", "fp16"),
    "optim.lr_scheduler": ("cosine", "wsd", "constant"),
    "data.truncation": ("error", "left", "right"),
    "trainer.device": ("auto", "cuda", "npu", "cpu"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "trainer.checkpoint.export.dtype": ("auto", "bf16", "fp16", "fp32"),
}
GATHERING: dict[str, tuple[str | bool, ...]] = {"model.fsdp_config.keep_gathered": ("auto", True, False)}
"""Of the stages whose steps have micro-batches of a sharded model."""
AT_LEAST_ONE = (
    "data.train_batch_size", "data.micro_batch_size_per_gpu", "data.max_length", "trainer.total_epochs",
    "trainer.log_every", "trainer.max_nonfinite_steps", "ulysses_sequence_parallel_size",
)  # fmt: skip
RANGES = {  # lowest and highest value allowed
    "optim.lr": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.clip_grad": (1e-12, math.inf),
    "optim.lr_warmup_steps_ratio": (0, 1),
    "optim.min_lr_ratio": (0, 1),
    "optim.num_cycles": (0, math.inf),
    "model.lora_rank": (0, math.inf),
    "data.num_workers": (0, 256),
    "trainer.seed": (0, 2**31 - 1),
    "trainer.checkpoint.export.max_shard_gib": (1e-6, math.inf),
}
LARGEST = 2**31 - 1
"""Upper bound for counts of samples, tokens, steps and the like, whose products must fit into 64 bits."""
NOT_EMPTY = {
    "trainer.project_name": "the project that the run belongs to",
    "trainer.experiment_name": "the run's name",
    "trainer.default_local_dir": "the directory that the run writes into",
}
MAY_BE_INFINITE = ("optim.clip_grad",)  # which then clips nothing
WITHOUT_EFFECT = {  # verl's keys that this trainer has no use for: the value they must keep, and what to do instead
    "trainer.default_hdfs_dir": (None, "mount the file system and set trainer.default_local_dir"),
    "model.fsdp_config.offload_params": (False, "model.fsdp_config.cpu_offload=true offloads the parameters"),
    "model.fsdp_config.wrap_policy.min_num_params": (0, "FSDP2 shards by layer class"),
    "data.use_shm": (False, "the data are in memory anyway"),
    "data.micro_batch_size": (None, "verl dropped it, set data.micro_batch_size_per_gpu"),
    "optim.lr_scheduler_type": ("constant", "set optim.lr_scheduler"),
    "optim.warmup_style": (None, "set optim.lr_scheduler"),
    "optim._target_": ("verl.workers.config.FSDPOptimizerConfig", "set optim.optimizer and optim.optimizer_impl"),
}
NULL_OR_AT_LEAST_ONE = (
    "trainer.total_training_steps", "trainer.max_ckpt_to_keep", "trainer.checkpoint.export.every",
)  # fmt: skip

MINUS_ONE_OR_AT_LEAST_ONE = ("data.train_max_samples", "data.val_max_samples")
OTHERWISE = {  # what a number that its key cannot have may have been meant to say
    **dict.fromkeys(("data.train_max_samples", "data.val_max_samples", "data.eval_batches"), "-1 for all"),
    "rollout.top_k": "-1 for all",
    "data.eval_every_steps": "0 for never",
    "trainer.log_samples_every": "0 for never",
    "trainer.max_ckpt_to_keep": "null for all",
    "trainer.total_training_steps": "null for all epochs",
    "trainer.checkpoint.export.every": "null for every save",
    "actor.ppo_mini_batch_size": "null for one update per pass",
    "data.max_tokens_per_gpu": "null for data.micro_batch_size_per_gpu * data.max_length",
    "data.num_tokenizers": "null for one per core",
    "health.every": "set health.enabled=false for no checks",
}


def check_values(config: DictConfig) -> None:
    """Refuse single values outside their range and settings that this pipeline cannot serve.

    Raises:
        UserError: the key, its value and what it may be.
    """
    check_choices(config, CHOICES)
    for key in AT_LEAST_ONE:
        require_positive(key, value_of(config, key))
    for key in NULL_OR_AT_LEAST_ONE:
        if value_of(config, key) is not None:
            require_positive(key, value_of(config, key))
    for key in MINUS_ONE_OR_AT_LEAST_ONE:
        if value_of(config, key) != -1:
            require_positive(key, value_of(config, key))
    check_ranges(config, RANGES)
    for key, (unused, instead) in WITHOUT_EFFECT.items():
        if value_of(config, key) != unused:
            raise UserError(f"{key} has no effect in this trainer; leave it at {unused}: {instead}")
    check_betas(list(config.optim.betas))
    for key, what in NOT_EMPTY.items():
        if not str(value_of(config, key)).strip():
            raise UserError(f"{key} is empty; give {what}")
    if config.model.strategy != "fsdp2":
        raise UserError(
            f"model.strategy is '{config.model.strategy}', but this trainer shards with fsdp2; set it to fsdp2, which "
            "goes on from checkpoints of either"
        )
    check_save_contents(config)
    check_export_frequency(config.trainer)
    check_resume_path(config)


def check_choices(config: DictConfig, choices: Mapping[str, Sequence[str | int | None]]) -> None:
    """Refuse a value that is none of those that its key may have."""
    for key, known in choices.items():
        if value_of(config, key) not in known:
            raise UserError(f"{key} is '{value_of(config, key)}'; take one of {', '.join(map(str, known))}")


def check_without_effect(config: DictConfig, unused: Mapping[str, object], where: str) -> None:
    """Refuse another value than that which a key must keep in a stage that has no use for it.

    Args:
        config: the resolved configuration.
        unused: by key the value that it must keep.
        where: the key has no effect, as the message says it.
    """
    for key, value in unused.items():
        if value_of(config, key) != value:
            raise UserError(f"{key} has no effect {where}; leave it at {value}")


def check_ranges(config: DictConfig, ranges: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a number outside the lowest and highest that its key may have, or one that is infinite; null is none."""
    for key, (low, high) in ranges.items():
        value = value_of(config, key)
        is_endless = value is not None and math.isinf(value) and key not in MAY_BE_INFINITE
        if isinstance(value, int) and math.isinf(high) and value > LARGEST:
            raise UserError(f"{key} is {value}; it must be at most {LARGEST}{_otherwise(key)}")
        if value is not None and (is_endless or not low <= value <= high):
            bounds = f"lie between {low} and {high}" if math.isfinite(high) else f"be a number of at least {low}"
            raise UserError(f"{key} is {value}; it must {bounds}")


def check_ascending(config: DictConfig, key: str, may_be_empty: bool = False) -> None:
    """Refuse a list of anything but ascending whole numbers of at least 1."""
    values = list(value_of(config, key))
    are_whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in values)
    if not are_whole or values != sorted(set(values)) or not (values or may_be_empty):
        raise UserError(f"{key} is {values}; it must be a list of ascending whole numbers of at least 1")


def check_betas(betas: list[Any]) -> None:
    """AdamW's two decay rates, each from 0 to below 1."""
    if len(betas) != 2 or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas):
        raise UserError(f"optim.betas is {betas}; it must be two numbers from 0 to below 1, such as [0.9, 0.95]")


def value_of(config: DictConfig | Mapping[str, Any], dotted_key: str) -> Any:
    """The value at a dotted key, which must be there."""
    for name in dotted_key.split("."):
        config = config[name]
    return config


def require_positive(key: str, value: object) -> None:
    """Raise a `UserError` unless `value` is a whole number of at least 1; it tells what else the key may have."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST:
        at_most = f" and at most {LARGEST}" if isinstance(value, int) and value > LARGEST else ""
        raise UserError(f"{key} is {value!r}; it must be a whole number of at least 1{at_most}{_otherwise(key)}")


def _otherwise(key: str) -> str:
    return f", or {OTHERWISE[key]}" if key in OTHERWISE else ""


def check_save_contents(config: DictConfig) -> None:
    """Known names only, and the weights among them; without optimizer or extra state a resume starts those anew."""
    known = {"model", "optimizer", "extra", "hf_model"}
    for key in ("save_contents", "load_contents"):
        contents = set(config.trainer.checkpoint[key])
        if contents - known:
            raise UserError(f"trainer.checkpoint.{key} names {sorted(contents - known)}; known are {sorted(known)}")
    if "model" not in config.trainer.checkpoint.save_contents:
        raise UserError(
            "trainer.checkpoint.save_contents lacks 'model'; a checkpoint without weights cannot be resumed"
        )


def check_export_frequency(trainer: DictConfig) -> None:
    """An export is part of a save, so it can only be due where a save is."""
    every, save_freq = trainer.checkpoint.export.every, trainer.save_freq
    if every is not None and (save_freq < 1 or every % save_freq):
        raise UserError(
            f"trainer.checkpoint.export.every is {every}, which is no multiple of trainer.save_freq={save_freq}; an "
            "export is written with a save"
        )


def check_resume_path(config: DictConfig) -> None:
    """`resume_from_path`, where it is used, must name a `global_step_N` directory."""
    path = config.trainer.resume_from_path
    if config.trainer.resume_mode == "resume_path" and path is None:
        raise UserError("trainer.resume_mode=resume_path has no path; set trainer.resume_from_path=.../global_step_N")
    if path is not None and config.trainer.resume_mode != "disable":
        if not Path(path).is_dir() or not Path(path).name.startswith("global_step_"):
            raise UserError(
                f"trainer.resume_from_path is '{path}', which is no global_step_N directory; "
                "name one, or set it to null"
            )


def check_batch(config: DictConfig, world_size: int) -> None:
    """Check that the global batch divides over the data-parallel ranks, and into mini-batches that divide over them.

    Micro-batches may leave a remainder.

    Args:
        config: the resolved configuration.
        world_size: number of ranks on all nodes.

    Raises:
        UserError: they do not divide. The message names values of all keys concerned that work together.
    """
    sequence_parallel = config.ulysses_sequence_parallel_size
    if world_size % sequence_parallel:
        raise UserError(
            f"ulysses_sequence_parallel_size {sequence_parallel} does not divide the {world_size} ranks; "
            "choose a divisor"
        )
    if sequence_parallel > 1 and not config.use_remove_padding:
        raise UserError("ulysses_sequence_parallel_size is above 1; set use_remove_padding=true, which it needs")
    if sequence_parallel > 1 and importlib.util.find_spec("flash_attn") is None:
        raise UserError("ulysses_sequence_parallel_size above 1 needs GPUs and the flash-attn package; install it")
    ranks, batch = world_size // sequence_parallel, config.data.train_batch_size
    mini_batch = OmegaConf.select(config, "actor.ppo_mini_batch_size")  # None in the stages of SFT
    if mini_batch is not None:
        require_positive("actor.ppo_mini_batch_size", mini_batch)
    divided = mini_batch or batch  # what each update divides over the ranks
    if divided % ranks == 0 and batch % divided == 0:
        return
    given = {"data.train_batch_size": batch}
    rule = f"must be a multiple of the number of data-parallel ranks, {ranks}"
    if mini_batch is not None:
        given["actor.ppo_mini_batch_size"] = mini_batch
        rule = f"must be a multiple of actor.ppo_mini_batch_size={mini_batch}, which {rule}"
    working = dict(zip(given, nearest_batches(batch, mini_batch, ranks)))
    changes = " ".join(f"{key}={value}" for key, value in working.items() if value != given[key])
    fewer = fewer_ranks(config, world_size, divided) if batch % divided == 0 else None
    or_fewer = "" if fewer is None else f", or start {fewer} ranks"
    raise UserError(f"data.train_batch_size={batch} {rule}; set {changes}{or_fewer}")


def nearest_batches(batch: int, mini_batch: int | None, ranks: int) -> tuple[int, int]:
    """The global batch and mini-batch nearest to those given that divide over the ranks and into each other.

    Args:
        batch: samples of a step, over all ranks.
        mini_batch: samples of an update, over all ranks; None for the whole batch.
        ranks: data-parallel ranks.
    """
    wanted = batch if mini_batch is None else mini_batch
    if batch % ranks == 0:  # it can stay
        sizes = [size for size in range(ranks, batch + 1, ranks) if batch % size == 0]
        return batch, min(sizes, key=lambda size: (abs(size - wanted), -size))
    size = nearest_multiple(wanted, ranks)
    return nearest_multiple(batch, size), size


def nearest_multiple(number: int, divisor: int) -> int:
    """The multiple of `divisor`, itself or more, that is nearest to a number; the larger of two."""
    return max(1, (number + divisor // 2) // divisor) * divisor


def fewer_ranks(config: DictConfig, world_size: int, divided: int) -> int | None:
    """The largest number of ranks, more than one and fewer than asked for, that divides an update; None if none does.

    Args:
        config: the resolved configuration.
        world_size: number of ranks asked for.
        divided: samples of an update, over all ranks.
    """
    sequence_parallel = config.ulysses_sequence_parallel_size
    tensor_parallel = OmegaConf.select(config, "rollout.tensor_model_parallel_size") or 1
    unit = math.lcm(config.trainer.nnodes, sequence_parallel, tensor_parallel)
    counts = [count for count in range(unit, world_size, unit) if divided % (count // sequence_parallel) == 0]
    return counts[-1] if counts and counts[-1] > 1 else None
