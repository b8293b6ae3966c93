"""Checks before the ranks start that depend on this machine, such as its files, packages and GPUs.

Nothing here changes the run directory. Checks of the configuration alone are `check` methods of the dataclasses.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.manifest import EXPORT, TRACKER, list_checkpoints, step_of
from verl_ext.commands import missing_package, program, require_optional_package
from verl_ext.config.compose import load_yaml
from verl_ext.config.recipes import find_recipe
from verl_ext.config.run_config import read_config_file
from verl_ext.config.schema import as_dict
from verl_ext.console import warn
from verl_ext.data.config import TextDataConfig, file_list
from verl_ext.data.dataset import check_parquet
from verl_ext.data.prepare.recipe_commands import is_within, missing_commands, output_of, run_commands, used_commands
from verl_ext.data.training_templates import parse_chat_template, read_chat_template
from verl_ext.errors import USER_ERROR_EXIT_CODE, UserError, first_line_of
from verl_ext.hardware import gpu_id, listed_gpus, visible_gpus
from verl_ext.health.rules import load_rules
from verl_ext.launch.configure import has_custom_class, is_first_node, resolve_model
from verl_ext.launch.report import WRITTEN
from verl_ext.launch.watcher import evaluation_environment
from verl_ext.metrics.recorder import require_known_backends
from verl_ext.metrics.registry import lookup_metric
from verl_ext.metrics.run_record import RunRecord
from verl_ext.model_files import check_model_files, require_chat_template
from verl_ext.plugins import Plugin, is_module
from verl_ext.processes import defer_gc, hold_stop_signals
from verl_ext.trainer.config import OptimConfig, TrainerConfig
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, RunConfig, SFTConfig, VLMSFTConfig

LANGUAGE_MODEL_STAGES = frozenset({"sft", "grpo"})


def prepare_inputs(config: RunConfig) -> None:
    """Check what can already be checked, then run the recipe's `prepare` commands whose output is needed but missing.

    Sets the model that a stage after SFT starts from.

    Raises:
        UserError: for the first problem, with the fix.
    """
    check_config(config)
    if isinstance(config, GRPOConfig | BudgetConfig):
        resolve_model(config)
    commands = missing_commands(needed_commands(config))
    if commands:
        check_inputs(config, awaited=[output_of(command) for command in commands])
        run_commands(commands)


def preflight(config: RunConfig) -> None:
    """Check the model, the data and the evaluation during training, once all inputs are prepared.

    Raises:
        UserError: for the first problem, with the fix.
    """
    check_inputs(config)
    check_evaluation(config)


def check_config(config: RunConfig) -> None:
    """Check what does not depend on prepared inputs.

    Raises:
        UserError: for the first problem, with the fix.
    """
    check_settings(config)
    check_components(config)
    check_run_directory(config.trainer.run_dir)
    check_resumed_stage(config)


def needed_commands(config: RunConfig) -> list[str]:
    """Return the `prepare` commands whose output the configuration or its evaluation recipe names."""
    values = {key: value for key, value in as_dict(config).items() if key != "prepare"}
    return used_commands(config.prepare, values, lambda: load_yaml(find_recipe("eval", config.eval.recipe_name)))


# Settings


def check_settings(config: RunConfig) -> None:
    """Refuse settings that cannot work with any model or data."""
    config.check_ranks(config.trainer.nnodes * config.trainer.n_gpus_per_node)
    config.trainer.preemption.check_deadline_ahead()
    if config.eval.recipe is not None:
        find_recipe("eval", config.eval.recipe, "eval.recipe")
    check_best_metric(config.trainer.checkpoint.best_metric)
    path = config.trainer.resume_from_path
    if path is not None and config.trainer.resume_mode != "disable":
        if not Path(path).is_dir() or step_of(Path(path)) is None:
            raise UserError(
                f"trainer.resume_from_path is '{path}', which is not a global_step_N directory; specify one, or set "
                "it to null"
            )
    check_health(config)
    if isinstance(config, GRPOConfig):
        from verl_ext.grpo.rewards.check import check_reward_settings

        check_reward_settings(config.reward, config.data)
        if config.rollout.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise UserError(f"rollout.engine=vllm: {missing_package('vllm')}, or set rollout.engine=hf")
    elif isinstance(config, BudgetConfig) and config.model.adapter is not None:
        Plugin.parse(config.model.adapter, "model.adapter")
    elif isinstance(config, VLMSFTConfig) and config.model.partial_pretrain is None:
        raise UserError("no model to train is given; set model.partial_pretrain to a vision-language model")


def check_best_metric(name: str) -> None:
    """Refuse a metric that checkpoints do not record."""
    lookup_metric(name)
    if not name.startswith(("train/", "val/")) and (not name.startswith("eval/") or name.count("/") > 1):
        raise UserError(
            f"trainer.checkpoint.best_metric is {name}, which checkpoints do not record; set it to a metric train/..., "
            "val/... or eval/NAME"
        )


def check_health(config: RunConfig) -> None:
    """Check that `health.rules` can be loaded, and that `health.stop_on` names rules of the stage."""
    known = [rule.name for rule in load_rules(config.health.rules, "health.rules") if config.stage in rule.stages]
    for name in config.health.stop_on:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3) or known
            raise UserError(f"health.stop_on names '{name}', which is not a rule of this stage; use {', '.join(near)}")


# Trackers, packages, devices and classes


def check_components(config: RunConfig) -> None:
    """Refuse names that do not exist, in the settings that every stage reads."""
    require_known_backends(list(config.trainer.logger))
    check_optimizer(config.optim)
    check_device(config.trainer)
    if config.model.use_liger:
        require_optional_package("liger-kernel", "model.use_liger=true", "model.use_liger=false")
    if config.model.attn_implementation == "flash_attention_2":
        key = "model.attn_implementation"
        require_optional_package("flash-attn", f"{key}=flash_attention_2", f"{key}=auto")
    if isinstance(config.data, TextDataConfig) and config.data.chat_template is not None:
        parse_chat_template(read_chat_template(str(config.data.chat_template)))
    library = config.model.external_lib
    if library is not None and not is_module(str(library)):
        raise UserError(f"model.external_lib names the module '{library}', which is not installed; correct its name")
    path = config.data.custom_cls.path if isinstance(config, SFTConfig) else None
    if path is not None and not str(path).startswith("pkg://") and not Path(path).is_file():
        raise UserError(f"data.custom_cls.path={path} does not exist; correct the path")


def check_device(trainer: TrainerConfig) -> None:
    """Check that `trainer.device` exists, and that there is a GPU for each rank if it is cuda.

    torch imports slowly, so it is imported only if its answer can change the result.
    """
    wanted, ranks, num_gpus = trainer.device, trainer.n_gpus_per_node, len(visible_gpus())
    has_too_few = wanted in ("auto", "cuda") and 0 < num_gpus < ranks
    if wanted == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise UserError("trainer.device is npu, which needs the package torch_npu; set trainer.device=auto")
    if wanted == "npu" or (wanted == "auto" and not has_too_few):
        return
    with defer_gc(), hold_stop_signals():
        import torch

    available = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and available == "cpu":
        raise UserError("trainer.device is cuda, but torch finds no GPU here; set trainer.device=auto")
    if wanted == "cpu" and available == "cuda":
        raise UserError(
            "trainer.device=cpu is not supported on a machine with GPUs; to train on the CPU, hide them with "
            "CUDA_VISIBLE_DEVICES=''"
        )
    if has_too_few and available == "cuda":
        raise UserError(
            f"{ranks} ranks need {ranks} GPUs, but only {num_gpus} can be used here; start {num_gpus} ranks, or train "
            "on the CPU with CUDA_VISIBLE_DEVICES=''"
        )


def check_optimizer(optim: OptimConfig) -> None:
    """Check that `optim.optimizer` is a class of the module `optim.optimizer_impl` and accepts its arguments.

    The default always exists, so it does not need torch.
    """
    name, place, further = optim.optimizer, optim.optimizer_impl, dict(optim.override_optimizer_config or {})
    if (name, place) == ("AdamW", "torch.optim") and not further:
        return
    with defer_gc(), hold_stop_signals():
        import torch

        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise UserError(
                f"optim.optimizer_impl is '{place}', which cannot be imported ({first_line_of(error)}); install its "
                "package, or use torch.optim"
            ) from error
    if not callable(getattr(module, name, None)):
        classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
        known = [key for key, value in classes.items() if issubclass(value, torch.optim.Optimizer)]
        lower = {key.lower(): key for key in known if key != "Optimizer"}
        near = difflib.get_close_matches(name.lower(), lower, n=1)
        hint = f"did you mean '{lower[near[0]]}'?" if near else f"use one of {', '.join(sorted(lower.values()))}"
        raise UserError(f"optim.optimizer is '{name}', which {place} does not have; {hint}")
    arguments: dict[str, Any] = {"lr": optim.lr, "weight_decay": optim.weight_decay}  # as verl's build_optimizer passes
    if "adam" in name.lower() or "ademamix" in name.lower():
        arguments["betas"] = optim.betas
    try:
        getattr(module, name)([torch.nn.Parameter(torch.zeros(2, 2))], **{**arguments, **further})
    except (TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and place != "torch.optim" and torch.cuda.is_available():
            return  # other packages may have kernels for GPUs only, which the ranks use
        raise UserError(
            f"optim.optimizer={name} rejects its arguments ({first_line_of(error)}); correct "
            "optim.override_optimizer_config, or use another optimizer"
        ) from error


# The run directory


def check_run_directory(run_dir: Path) -> None:
    """Check that the run directory or its parent is writable, and that names of the run's files are free."""
    path = run_dir.absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    problem = None
    if not nearest.is_dir():
        problem = f"{nearest} is not a directory"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"no permission to write into {nearest}"
    if problem is not None:
        raise UserError(f"the run directory {path} cannot be written ({problem}); set trainer.default_local_dir")
    for name in (*WRITTEN, TRACKER):
        is_directory = name.endswith("/")
        for each in path.glob(name.rstrip("/")):
            if each.is_dir() != is_directory:
                found, wanted = ("not a directory", "directory") if is_directory else ("a directory", "file")
                raise UserError(f"{each} is {found}, but the run writes a {wanted} with that name; move or rename it")


def check_resumed_stage(config: RunConfig) -> None:
    """Refuse to resume a run of another stage, before its `run.json` changes.

    The stages of language models can start from each other's checkpoints, but not in the same run directory.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return
    named = None if trainer.resume_from_path is None else Path(trainer.resume_from_path)
    if named is not None and (stage := stage_of_run(named.parent)) not in (None, config.stage):
        if not {stage, config.stage} <= LANGUAGE_MODEL_STAGES:
            own_model = _start_from_model(config, stage, named.parent)
            raise UserError(
                f"trainer.resume_from_path={named} is a checkpoint of the stage {stage}, which the stage "
                f"{config.stage} cannot resume; set trainer.resume_from_path=null{own_model}"
            )
    checkpoints = list_checkpoints(trainer.run_dir) if named is None or trainer.resume_mode == "auto" else []
    if checkpoints and (stage := stage_of_run(trainer.run_dir)) not in (None, config.stage):
        raise UserError(
            f"{checkpoints[0]} is a checkpoint of the stage {stage}, which the stage {config.stage} cannot resume; set "
            f"trainer.experiment_name to a new name{_start_from_model(config, stage, trainer.run_dir)}"
        )


def _start_from_model(config: RunConfig, stage: str | None, run_dir: Path) -> str:
    """How to start from the model that a run of another stage has trained; empty if this stage cannot use it."""
    if isinstance(config, BudgetConfig) and stage == "vlm_sft":
        return f", and model.sft_run={run_dir} to train a controller of its model"
    if {stage, config.stage} <= LANGUAGE_MODEL_STAGES:
        return f", and model.partial_pretrain={run_dir}/global_step_N/{EXPORT} to start from its weights"
    return ""


def stage_of_run(run_dir: Path) -> str | None:
    """The stage of a run: from its `config.yaml`, else from `run.json`; None if it has neither, as verl's own runs.

    A launch changes `run.json` before its ranks accept the checkpoint, and `config.yaml` only after that.
    """
    with suppress(UserError):  # damaged files are replaced
        if (path := run_dir / "config.yaml").is_file():
            stage = read_config_file(path).get("stage")
            return stage if isinstance(stage, str) else None
    with suppress(UserError):
        stage = RunRecord(run_dir).read()["stage"]
        return stage if isinstance(stage, str) else None
    return None


# Model and data


def check_inputs(config: RunConfig, awaited: Sequence[Path] = (), *, fills_batch: bool = True) -> None:
    """Check the model, the data and the reward functions.

    Args:
        awaited: directories that are not prepared yet; nothing in them is checked.
        fills_batch: whether the training data must fill a batch.
    """
    has_model = not is_within(config.model.partial_pretrain, awaited)
    if has_model:
        check_model_files(str(config.model.partial_pretrain), config.model.trust_remote_code)
    if isinstance(config, SFTConfig | GRPOConfig):
        if has_model and config.data.chat_template is None and not has_custom_class(config):
            require_chat_template(str(config.model.partial_pretrain))
        files = [(key, name) for key in ("train_files", "val_files") for name in file_list(getattr(config.data, key))]
        here = [(key, name) for key, name in files if not is_within(name, awaited)]
        has_data = len(here) == len(files)
        if has_data:
            check_data(config, fills_batch=fills_batch)
        else:
            for key, name in here:
                check_parquet(Path(name).expanduser(), key, config.data.columns)
        if has_model and isinstance(config, SFTConfig):
            warn_of_extended_context(config)
        if isinstance(config, GRPOConfig):
            check_prompts_and_rewards(config, has_model, has_data)
    elif isinstance(config, BudgetConfig):
        check_budget_files(config, awaited)
    elif isinstance(config, VLMSFTConfig):
        check_questions(config, ("train",), awaited)


def check_data(config: SFTConfig | GRPOConfig, *, fills_batch: bool = True) -> None:
    """Check that data files are parquet with the configured columns, and that training data fills a batch."""
    rows = {}
    for key in ("train_files", "val_files"):
        files = file_list(getattr(config.data, key))
        rows[key] = sum(check_parquet(Path(name).expanduser(), key, config.data.columns) for name in files)
        if files and rows[key] == 0:
            or_none = ", or val_files=null for none" if key == "val_files" else ""
            raise UserError(f"data.{key} has no rows ({', '.join(files)}); specify a dataset{or_none}")
    if not rows["train_files"]:
        raise UserError("data.train_files is empty; specify at least one parquet file")
    limit = config.data.train_max_samples
    rows_used = min(rows["train_files"], limit) if limit > 0 else rows["train_files"]
    if fills_batch and rows_used < config.data.train_batch_size:
        raise UserError(
            f"the training set has {rows_used} rows, fewer than one global batch of {config.data.train_batch_size}; "
            f"{_smaller_batch(config, rows_used)}"
        )


def _smaller_batch(config: SFTConfig | GRPOConfig, num_rows: int) -> str:
    """How to train on fewer rows than a global batch: settings that also divide over the ranks."""
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node // config.sequence_parallel_size
    if num_rows < ranks:
        return f"provide at least {ranks}, one per data-parallel rank, and set data.train_batch_size={ranks}"
    mini_batch = config.actor.ppo_mini_batch_size if isinstance(config, GRPOConfig) else None
    divisor = ranks if mini_batch is None or mini_batch > num_rows else mini_batch
    batch = num_rows // divisor * divisor
    also = f" actor.ppo_mini_batch_size={batch}" if mini_batch is not None and mini_batch > num_rows else ""
    return f"set data.train_batch_size={batch}{also}"


def warn_of_extended_context(config: SFTConfig) -> None:
    """Warn if `data.max_length` exceeds the model's context, which is then extended as in verl."""
    context = context_of(config)
    if context is not None and config.data.max_length > context:
        warn(
            f"data.max_length={config.data.max_length} exceeds the model's context of {context} tokens, so the trained "
            "model declares the longer context"
        )


def context_of(config: SFTConfig | GRPOConfig) -> int | None:
    """Return the model's context in tokens; None if it is unknown or the model is a name on the Hub."""
    path = Path(str(config.model.partial_pretrain)).expanduser() / "config.json"
    return json.loads(path.read_text()).get("max_position_embeddings") if path.is_file() else None


def check_prompts_and_rewards(config: GRPOConfig, has_model: bool, has_data: bool) -> None:
    """Check that prompts and completions fit into the model's context, and that the judge and the rewards work."""
    from verl_ext.grpo.rewards.check import check_judge, check_reward_functions

    context = context_of(config) if has_model else None
    wanted = config.data.max_prompt_length + config.data.max_response_length
    if context is not None and wanted > context:
        raise UserError(
            f"data.max_prompt_length + data.max_response_length is {wanted}, more than the model's context of "
            f"{context} tokens; lower one of them"
        )
    check_judge(config.reward)
    if has_data:
        check_reward_functions(config.reward, config.data)


def check_budget_files(config: BudgetConfig, awaited: Sequence[Path]) -> None:
    """Check that the questions and other files of the stage budget exist; see `check_inputs` for `awaited`."""
    check_questions(config, ("train", "val"), awaited)
    named = {
        "controller.init_from": config.controller.init_from,
        "controller.importance_file": config.controller.importance_file,
        "latency.file": config.latency.file,
    }
    for key, path in named.items():
        if path is not None and not is_within(path, awaited) and not Path(path).expanduser().exists():
            raise UserError(f"{key}={path} does not exist; correct the path, or set it to null")


def check_questions(config: BudgetConfig | VLMSFTConfig, splits: Sequence[str], awaited: Sequence[Path]) -> None:
    """Check that each split has questions and that its datasets exist; see `check_inputs` for `awaited`."""
    from verl_ext.data.image_questions import require_rows

    sources = config.data.sources()
    for split in splits:
        if not any(source.size(split) for source in sources.values()):
            raise UserError(
                f"there are no questions for {split}; set data.datasets.NAME.{split} to a size, or to -1 for all"
            )
        for name, source in sources.items():
            if source.size(split) and not is_within(source.source, awaited):
                require_rows(name, source, split)


# The evaluation during training


def check_evaluation(config: RunConfig) -> None:
    """With `eval.watch=true`, run the watcher's checks and refuse GPUs that the ranks use; on the first node.

    Raises:
        UserError: the recipe, one of its local data files, the sandbox, or `eval.devices` cannot be used.
    """
    if not config.eval.watch or not is_first_node():
        return
    command = [sys.executable, "-m", "eval_pipeline", "check", "--watch", "--json"]
    command.append(f"--recipe={config.eval.recipe_name}")  # one word, even if the name starts with a dash
    # In a process, because nothing here imports the evaluation.
    done = subprocess.run(command, env=evaluation_environment(config), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["it printed no output"])[-1].removeprefix("error: ")
        if done.returncode != USER_ERROR_EXIT_CODE:
            reason = f"its check ended with exit code {done.returncode}: {reason}"
        raise UserError(f"the evaluation during training (eval.watch=true) cannot start: {reason}")
    if json.loads(done.stdout)["gpus"]:
        require_free_gpus(config.eval.device_names, config.trainer.n_gpus_per_node)


def require_free_gpus(devices: Sequence[str] | None, num_ranks: int) -> None:
    """Refuse an evaluation on GPUs that the training uses: vLLM takes nearly all memory of the GPUs it sees.

    Args:
        devices: `eval.devices`; None gives the evaluation all visible GPUs.
        num_ranks: number of ranks on this machine; they use the first visible GPUs, one each.
    """
    listed = listed_gpus()
    used = [gpu_id(name, listed) for name in visible_gpus(listed)[:num_ranks]]
    if devices is None and used:
        raise UserError(
            f"eval.watch=true needs GPUs that the {num_ranks} ranks leave free; specify them with eval.devices, such "
            f"as eval.devices=7, or evaluate after training with `{program('eval')} watch`"
        )
    for name in devices or ():
        if listed and not name.startswith("MIG-") and gpu_id(name, listed) not in listed:
            known = "only GPU 0" if len(listed) == 1 else f"GPUs 0 to {len(listed) - 1}"
            raise UserError(f"eval.devices names GPU {name}, but this machine has {known}; specify one of those")
        if gpu_id(name, listed) in used:
            raise UserError(
                f"eval.devices names GPU {name}, which one of the {num_ranks} ranks uses; specify a free one, or start "
                "fewer ranks"
            )
