"""Suggestions for mistyped keys, options and commands, including the names that other programs use for them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping

RANKS = "trainer.n_gpus_per_node"
"""The number of ranks, which is the first word of a command instead of a key."""
_BATCH, _MICRO_BATCH = ("data.train_batch_size",), ("data.micro_batch_size_per_gpu",)
_EPOCHS, _STEPS = ("trainer.total_epochs",), ("trainer.total_training_steps",)
_EVAL_EVERY = ("data.eval_every_steps", "trainer.test_freq")
_MODEL, _DATA = ("model.partial_pretrain",), ("data.datasets", "data.train_files")
_LENGTH = ("data.max_response_length", "controller.max_new_tokens", "data.max_length", "sampling.max_tokens")
_CLIP, _REWARD = ("actor.clip_ratio_low",), ("reward.functions", "reward.accuracy")
_RUN_DIR, _RECIPE, _NUM_RANKS = ("trainer.default_local_dir",), ("recipe",), ("gpus", RANKS)
_SHORT_NUM_RANKS = ("-n", "-np", "-g")
KEYS: Mapping[str, tuple[str, ...]] = {
    "learning_rate": ("optim.lr",),
    "lr_scheduler_type": ("optim.lr_scheduler",),
    "scheduler": ("optim.lr_scheduler",),
    "warmup": ("optim.lr_warmup_steps_ratio",),
    "warmup_ratio": ("optim.lr_warmup_steps_ratio",),
    "warmup_steps": ("optim.lr_warmup_steps",),
    "max_grad_norm": ("optim.clip_grad",),
    "gradient_clipping": ("optim.clip_grad",),
    "adam_beta1": ("optim.betas",),
    "adam_beta2": ("optim.betas",),
    "optim": ("optim.optimizer",),
    "batch_size": _BATCH,
    "global_batch_size": _BATCH,
    "gradient_accumulation_steps": _BATCH,
    "per_device_train_batch_size": _MICRO_BATCH,
    "per_device_eval_batch_size": _MICRO_BATCH,
    "micro_batch_size": _MICRO_BATCH,
    "ppo_micro_batch_size_per_gpu": _MICRO_BATCH,
    "num_train_epochs": _EPOCHS,
    "num_epochs": _EPOCHS,
    "max_epochs": _EPOCHS,
    "epochs": _EPOCHS,
    "max_steps": _STEPS,
    "num_steps": _STEPS,
    "total_steps": _STEPS,
    "steps": _STEPS,
    "save_steps": ("trainer.save_freq",),
    "save_every": ("trainer.save_freq",),
    "save_total_limit": ("trainer.max_ckpt_to_keep",),
    "eval_steps": _EVAL_EVERY,
    "eval_every": _EVAL_EVERY,
    "test_freq": _EVAL_EVERY,
    "logging_steps": ("trainer.log_every",),
    "report_to": ("trainer.logger",),
    "wandb": ("trainer.logger",),
    "output_dir": _RUN_DIR,
    "out_dir": _RUN_DIR,
    "output": _RUN_DIR,
    "save_dir": _RUN_DIR,
    "run_name": ("trainer.experiment_name",),
    "name": ("trainer.experiment_name",),
    "project": ("trainer.project_name",),
    "resume": ("trainer.resume_from_path",),
    "resume_from_checkpoint": ("trainer.resume_from_path",),
    "model": _MODEL,
    "model_name": _MODEL,
    "model_name_or_path": _MODEL,
    "model_path": _MODEL,
    "model.path": _MODEL,
    "base_model": _MODEL,
    "data": _DATA,
    "data_path": _DATA,
    "dataset": _DATA,
    "dataset_name": _DATA,
    "train_data": _DATA,
    "train_file": _DATA,
    "eval_dataset": ("data.datasets", "data.val_files"),
    "val_data": ("data.datasets", "data.val_files"),
    "val_file": ("data.datasets", "data.val_files"),
    "max_seq_length": _LENGTH,
    "max_seq_len": _LENGTH,
    "max_length": _LENGTH,
    "model_max_length": _LENGTH,
    "cutoff_len": _LENGTH,
    "max_completion_length": _LENGTH,
    "max_new_tokens": _LENGTH,
    "response_length": _LENGTH,
    "n": ("rollout.n", "sampling.n"),
    "num_generations": ("rollout.n",),
    "group_size": ("rollout.n",),
    "rollout.name": ("rollout.engine",),
    "use_vllm": ("rollout.engine",),
    "vllm_gpu_memory_utilization": ("rollout.gpu_memory_utilization",),
    "beta": ("actor.kl_loss_coef",),
    "kl_coef": ("actor.kl_loss_coef",),
    "epsilon": _CLIP,
    "cliprange": _CLIP,
    "clip_ratio": _CLIP,
    "epsilon_high": ("actor.clip_ratio_high",),
    "num_iterations": ("actor.ppo_epochs",),
    "loss_type": ("actor.loss_agg_mode",),
    "reward": _REWARD,
    "reward_fn": _REWARD,
    "reward_funcs": _REWARD,
    "reward_function": _REWARD,
    "custom_reward_function.path": _REWARD,
    "bf16": ("model.mixed_precision",),
    "fp16": ("model.mixed_precision",),
    "torch_dtype": ("model.mixed_precision",),
    "dtype": ("model.mixed_precision",),
    "gradient_checkpointing": ("model.enable_gradient_checkpointing",),
    "flash_attention": ("model.attn_implementation",),
    "lora": ("model.lora_rank",),
    "lora_r": ("model.lora_rank",),
    "use_peft": ("model.lora_rank",),
    "lora_target_modules": ("model.target_modules",),
    "use_liger_kernel": ("model.use_liger",),
    "torch_compile": ("model.compile",),
    "dataloader_num_workers": ("data.num_workers",),
    "config": _RECIPE,
    "config_file": _RECIPE,
    "config_name": _RECIPE,
    "config_path": _RECIPE,
    "c": _RECIPE,
    "np": _NUM_RANKS,
    "nproc": _NUM_RANKS,
    "nproc_per_node": _NUM_RANKS,
    "num_processes": _NUM_RANKS,
    "num_gpus": _NUM_RANKS,
    "gpus": _NUM_RANKS,
    "world_size": _NUM_RANKS,
    "gpu": ("hardware",),
}
"""Names in TRL, the HF Trainer, torchrun and verl's PPO, and the keys they mean; the first that a command has."""
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "config": ("recipe",),
    "c": ("recipe",),
    "model": ("checkpoint",),
    "model_path": ("checkpoint",),
    "ckpt": ("checkpoint",),
    "checkpoint_path": ("checkpoint",),
    "pretrained": ("checkpoint",),
    "out": ("output",),
    "output_dir": ("output",),
    "output_path": ("output",),
    "o": ("output",),
    "num_samples": ("samples", "limit"),
    "max_samples": ("samples", "limit"),
    "n": ("samples", "limit"),
    "keep": ("max-to-keep",),
    "force": ("yes",),
    "y": ("yes",),
    "logdir": ("root",),
    "log_dir": ("root",),
    "dir": ("root",),
    "bind_all": ("host",),
    "address": ("host",),
    "val_split": ("val-fraction",),
}
"""Names of options in other programs, and the options they mean; the first that the command has."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "list": ("ls", "status"),
    "show": ("ls", "status"),
    "info": ("ls", "status"),
    "remove": ("prune",),
    "rm": ("prune",),
    "delete": ("prune",),
    "clean": ("prune",),
    "check": ("verify",),
    "validate": ("verify", "check"),
    "convert": ("export",),
    "merge": ("export",),
    "save": ("export",),
    "compare": ("diff", "report"),
    "eval": ("run",),
    "evaluate": ("run",),
    "start": ("run",),
    "test": ("run",),
    "follow": ("watch",),
    "monitor": ("watch",),
    "results": ("report",),
    "summary": ("report",),
    "score": ("judge",),
    "grade": ("judge",),
    "rerun": ("retry",),
    "restart": ("retry",),
    "controller": ("adaptive",),
    "alpaca": ("chat",),
    "sharegpt": ("chat",),
    "json": ("chat",),
    "jsonl": ("chat",),
    "csv": ("chat",),
    "parquet": ("chat",),
    "mbpp": ("problems",),
    "humaneval": ("problems",),
    "charts": ("plot",),
    "graph": ("plot",),
}
"""Names of commands in other programs, and the commands they mean; the first that the program has."""
CUTOFF = 0.7
"""Minimum similarity of two words, from 0 to 1, for one to be a typo of the other."""


def meant_key(typed: str, known: Collection[str]) -> str | None:
    """The configuration key that was probably meant; None if none is similar.

    Args:
        typed: a key, or an option such as `--learning-rate`.
        known: the existing keys.
    """
    name = _plain(typed)
    if typed in _SHORT_NUM_RANKS and RANKS in known:
        return RANKS
    parts = name.split(".")
    for first in range(len(parts)):  # actor_rollout_ref.rollout.n is rollout.n
        rest = ".".join(parts[first:])
        found = next((key for key in (*KEYS.get(rest, ()), rest) if key in known), None)
        if found is not None and found != typed:
            return found
    same_end = [key for key in known if key.rpartition(".")[2] == parts[-1]]
    if same_end:
        near = difflib.get_close_matches(name, known, n=1, cutoff=CUTOFF)
        return max([*near, *same_end], key=lambda key: difflib.SequenceMatcher(None, key, name).ratio())
    names = {key: key for key in known}
    if len(parts) == 1:
        names = {key.rpartition(".")[2]: key for key in known} | names
        names |= {other: key for other in KEYS if (key := _first(KEYS[other], known)) is not None}
    with_prefix = {names[each] for each in names if each.startswith(name) and len(name) > 2}
    return with_prefix.pop() if len(with_prefix) == 1 else _nearest(name, names)


def meant_option(typed: str, known: Iterable[str]) -> str | None:
    """The option that was probably meant, with its dashes; None if none is similar.

    Args:
        typed: the option, without its value.
        known: the existing options, with their dashes.
    """
    options = {_plain(option): option for option in known if option.startswith("--")}
    other = _first([_plain(each) for each in OPTIONS.get(_plain(typed), ())], options)
    return options[other] if other is not None else _nearest(_plain(typed), options)


def meant_command(typed: str, known: Collection[str]) -> str | None:
    """The command that was probably meant; None if none is similar."""
    return _first(COMMANDS.get(typed.lower(), ()), known) or _nearest(typed.lower(), {name: name for name in known})


def _plain(word: str) -> str:
    """In lower case, without leading dashes, words joined by underscores."""
    return word.lstrip("-").replace("-", "_").lower()


def _first(wanted: Iterable[str], known: Collection[str]) -> str | None:
    return next((each for each in wanted if each in known), None)


def _nearest(word: str, names: Mapping[str, str]) -> str | None:
    """The value of the most similar name."""
    same_letters = [name for name in names if sorted(name) == sorted(word)]  # difflib misses swapped letters
    near = same_letters or difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF)
    return names[near[0]] if near else None
