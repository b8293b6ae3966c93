"""Suggestions for mistyped keys, options and commands, including their names in other programs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence

RANKS = "trainer.n_gpus_per_node"
"""Key of the number of ranks, which is the first argument of a command instead."""
_SHORT_NUM_RANKS = ("-n", "-np", "-g")


def _by_name(names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Our words by their names in other programs; both are separated by spaces."""
    return {name: tuple(ours.split()) for ours, others in names.items() for name in others.split()}


KEYS = _by_name(
    {
        "optim.lr": "learning_rate",
        "optim.lr_scheduler": "lr_scheduler_type scheduler",
        "optim.lr_warmup_steps_ratio": "warmup warmup_ratio",
        "optim.lr_warmup_steps": "warmup_steps",
        "optim.clip_grad": "max_grad_norm gradient_clipping grad_clip",
        "optim.betas": "adam_beta1 adam_beta2",
        "optim.optimizer": "optim",
        "data.train_batch_size": "batch_size global_batch_size gradient_accumulation_steps",
        "data.micro_batch_size_per_gpu": (
            "per_device_train_batch_size per_device_eval_batch_size micro_batch_size ppo_micro_batch_size_per_gpu"
        ),
        "trainer.total_epochs": "num_train_epochs num_epochs max_epochs epochs",
        "trainer.total_training_steps": "max_steps num_steps total_steps steps",
        "trainer.save_freq": "save_steps save_every",
        "trainer.max_ckpt_to_keep": "save_total_limit",
        "data.eval_every_steps trainer.test_freq": "eval_steps eval_every test_freq",
        "trainer.log_every": "logging_steps",
        "trainer.logger": "report_to wandb",
        "trainer.default_local_dir": "output_dir out_dir output save_dir",
        "trainer.experiment_name": "run_name name",
        "trainer.project_name": "project",
        "trainer.resume_from_path": "resume resume_from_checkpoint",
        "model.partial_pretrain": "model model_name model_name_or_path model_path model.path base_model",
        "data.datasets data.train_files": "data data_path dataset dataset_name train_data train_file",
        "data.datasets data.val_files": "eval_dataset val_data val_file",
        "data.max_response_length controller.max_new_tokens data.max_length sampling.max_tokens": (
            "max_seq_length max_seq_len max_length model_max_length cutoff_len max_completion_length "
            "max_new_tokens response_length"
        ),
        "rollout.n sampling.num_samples": "n",
        "rollout.n": "num_generations group_size",
        "rollout.engine": "rollout.name use_vllm",
        "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
        "algorithm.norm_adv_by_std_in_grpo": "scale_rewards",
        "algorithm.dynamic_sampling.max_rounds": "filter_groups.enable filter_groups.max_num_gen_batches",
        "actor.kl_loss_coef": "beta kl_coef",
        "actor.clip_ratio_low": "epsilon cliprange clip_ratio",
        "actor.clip_ratio_high": "epsilon_high",
        "actor.ppo_epochs": "num_iterations",
        "actor.loss_agg_mode": "loss_type",
        "actor.policy_loss.loss_mode": "importance_sampling_level loss_mode policy_loss",
        "reward.functions reward.accuracy": (
            "reward reward_fn reward_funcs reward_weights reward_function custom_reward_function.path"
        ),
        "model.mixed_precision": "bf16 fp16 torch_dtype dtype",
        "model.enable_gradient_checkpointing": "gradient_checkpointing",
        "model.attn_implementation": "flash_attention",
        "model.lora_rank": "lora lora_r use_peft",
        "model.target_modules": "lora_target_modules",
        "model.use_liger": "use_liger_kernel",
        "model.compile": "torch_compile",
        "data.num_workers": "dataloader_num_workers",
        "recipe": "config config_file config_name config_path c",
        f"gpus {RANKS}": "np nproc nproc_per_node num_processes num_gpus gpus world_size",
        "hardware": "gpu",
    }
)
"""Keys by their names in TRL, the HF Trainer, torchrun and verl's PPO; the first key that a command has is used."""
OPTIONS = _by_name(
    {
        "recipe": "config c",
        "checkpoint": "model model_path ckpt checkpoint_path pretrained",
        "output": "out output_dir output_path o",
        "samples limit": "num_samples max_samples n",
        "max-to-keep": "keep",
        "yes": "force y",
        "root": "logdir log_dir dir",
        "host": "bind_all address",
        "val-fraction": "val_split",
    }
)
"""Options by their names in other programs; the first option that the command has is used."""
COMMANDS = _by_name(
    {
        "ls status": "list show info",
        "prune": "remove rm delete clean",
        "verify": "check",
        "verify check": "validate",
        "export": "convert merge save",
        "diff report": "compare",
        "run": "eval evaluate start test",
        "watch": "follow monitor",
        "report": "results summary",
        "judge": "score grade",
        "retry": "rerun restart",
        "adaptive": "controller",
        "chat": "alpaca sharegpt json jsonl csv parquet",
        "problems": "mbpp humaneval",
        "plot": "charts graph",
    }
)
"""Commands by their names in other programs; the first command that the program has is used."""
CUTOFF = 0.7
"""Minimum similarity of two words, from 0 to 1, to count one as a typo of the other."""


def meant_key(typed: str, known: Collection[str]) -> str | None:
    """The configuration key that was probably meant by a key or an option; None if none is similar."""
    name = _plain(typed)
    if typed in _SHORT_NUM_RANKS and RANKS in known:
        return RANKS
    parts = name.split(".")
    section, _, last = name.rpartition(".")
    sections = {key.rpartition(".")[0] for key in known}
    is_unknown_subsection = _is_unknown_subsection(parts[:-1], sections)
    for first in range(len(parts) - is_unknown_subsection):  # actor_rollout_ref.rollout.n is rollout.n
        rest = ".".join(parts[first:])
        found = next((key for key in (*KEYS.get(rest, ()), rest) if key in known), None)
        if found is not None and found != typed:
            return found
    if is_unknown_subsection:  # rollout.val_kwargs.n is not rollout.n
        near = difflib.get_close_matches(section, sections, n=1, cutoff=CUTOFF)
        known = [key for key in known if key.rpartition(".")[0] in near]
    siblings = {key.rpartition(".")[2]: key for key in known if section and key.rpartition(".")[0] == section}
    if (sibling := _nearest(last, siblings)) is not None:
        return sibling
    same_end = [key for key in known if key.rpartition(".")[2] == last]
    if same_end:
        return max(same_end, key=lambda key: difflib.SequenceMatcher(None, key, name).ratio())
    names = {key: key for key in known}
    if len(parts) == 1:
        names = {key.rpartition(".")[2]: key for key in known} | names
        names |= {other: key for other in KEYS if (key := _first(KEYS[other], known)) is not None}
    with_prefix = {names[each] for each in names if each.startswith(name) and len(name) > 2}
    if len(with_prefix) == 1:
        return with_prefix.pop()
    return None if siblings else _nearest(name, names)  # the section makes the full names of its keys similar


def meant_option(typed: str, known: Iterable[str]) -> str | None:
    """The option that was probably meant, given an option without its value; None if none is similar."""
    options = {_plain(option): option for option in known if option.startswith("--")}
    other = _first([_plain(each) for each in OPTIONS.get(_plain(typed), ())], options)
    return options[other] if other is not None else _nearest(_plain(typed), options)


def meant_command(typed: str, known: Collection[str]) -> str | None:
    """The command that was probably meant; None if none is similar."""
    return _first(COMMANDS.get(typed.lower(), ()), known) or similar_name(typed, known)


def similar_name(typed: str, known: Iterable[str]) -> str | None:
    """The most similar name; None if none is similar."""
    return _nearest(typed.lower(), {name: name for name in known})


def _plain(word: str) -> str:
    """Convert to lowercase with underscores, without leading dashes."""
    return word.lstrip("-").replace("-", "_").lower()


def _is_unknown_subsection(path: Sequence[str], sections: Collection[str]) -> bool:
    """Whether the last part of a section's path is not a section, but the part before it is one."""
    parts = {part for section in sections for part in section.split(".")}
    return len(path) > 1 and path[-1] not in parts and path[-2] in parts


def _first(wanted: Iterable[str], known: Collection[str]) -> str | None:
    return next((each for each in wanted if each in known), None)


def _nearest(word: str, names: Mapping[str, str]) -> str | None:
    """The value of the most similar name."""
    same_letters = [name for name in names if sorted(name) == sorted(word)]  # difflib misses swapped letters
    near = same_letters or difflib.get_close_matches(word, names, n=1, cutoff=CUTOFF)
    return names[near[0]] if near else None
