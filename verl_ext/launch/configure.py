"""The resolved configuration of a launch, and everything about it that can be refused before torchrun starts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from verl_ext.checkpoint.layout import TRACKER
from verl_ext.checkpoint.resume import find_checkpoint, optimizer_name, require_same_optimizer
from verl_ext.commands import program
from verl_ext.config.recipes import find_recipe
from verl_ext.console import print_line
from verl_ext.data.config import file_list
from verl_ext.errors import UserError
from verl_ext.launch.component_check import check_components
from verl_ext.launch.from_verl import compose_as_typed
from verl_ext.launch.grpo_model import settle_model
from verl_ext.launch.health_check import check_health
from verl_ext.launch.own_files import convert_own_files, has_custom_class
from verl_ext.launch.preflight import check_data, check_model, check_own_chat_template, check_parquet
from verl_ext.launch.prepare import is_within
from verl_ext.launch.summary import WRITTEN
from verl_ext.metrics.names import describe
from verl_ext.plugins import Plugin
from verl_ext.trainer.config import TrainerConfig
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, RunConfig, VLMSFTConfig, keys_set_by


def configure(arguments: argparse.Namespace) -> RunConfig:
    """The configuration with the number of ranks filled in.

    Raises:
        UserError: see `load_config`; or no number of ranks, or NNODES that is no number.
    """
    config = compose_as_typed(arguments.stage, arguments.overrides)
    if arguments.num_processes is None and not arguments.print_config:
        raise UserError(f"no number of processes is given; type for example `{program(arguments.stage)} 2`")
    ranks = {"nnodes": num_nodes(), "n_gpus_per_node": arguments.num_processes or config.trainer.n_gpus_per_node}
    typed = keys_set_by(config.stage, arguments.overrides)
    given_by = {"nnodes": "NNODES (the number of machines)", "n_gpus_per_node": "the first word (ranks per machine)"}
    for name, number in ranks.items():
        if f"trainer.{name}" in typed and getattr(config.trainer, name) != number:
            value = getattr(config.trainer, name)
            raise UserError(f"trainer.{name}={value} contradicts {given_by[name]}, which is {number}; omit this key")
    config.trainer.trace |= arguments.trace
    config.trainer.nnodes, config.trainer.n_gpus_per_node = ranks.values()
    for sentence in convert_own_files(config, arguments.overrides):
        print_line(sentence, sys.stderr if arguments.print_config else None)
    return config


def num_nodes() -> int:
    """Machines of the run, by NNODES.

    Raises:
        UserError: that, NODE_RANK or MASTER_PORT cannot be what it says.
    """
    nodes = os.environ.get("NNODES", "1")
    if not nodes.isdecimal() or int(nodes) < 1:
        raise UserError(f"NNODES is '{nodes}'; it must be the number of machines")
    node = os.environ.get("NODE_RANK", "0")
    if not node.isdecimal() or int(node) >= int(nodes):
        raise UserError(f"NODE_RANK is '{node}'; with NNODES={nodes} it must be from 0 to {int(nodes) - 1}")
    port = os.environ.get("MASTER_PORT", "29500")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"MASTER_PORT is '{port}'; it must be a free port of the first machine")
    return int(nodes)


def check_config(config: RunConfig) -> None:
    """Refuse what cannot work before data are prepared, and choose the model that a stage after SFT starts from.

    Changes nothing in the run directory.

    Raises:
        UserError: the first thing that is wrong and how to fix it.
    """
    check_settings(config)
    check_components(config)
    check_run_directory(Path(config.trainer.default_local_dir))
    if isinstance(config, GRPOConfig | BudgetConfig):
        settle_model(config)


def check_settings(config: RunConfig) -> None:
    """Refuse settings that cannot work, whatever model and data they are for; needs no file and no hub.

    Raises:
        UserError: the first of them and how to fix it.
    """
    config.check_ranks(config.trainer.nnodes * config.trainer.n_gpus_per_node)
    config.trainer.preemption.check_deadline_ahead()
    if config.eval.recipe is not None:
        find_recipe("eval", config.eval.recipe, "eval.recipe")
    check_best_metric(config.trainer.checkpoint.best_metric)
    check_resume_path(config.trainer)
    check_health(config)
    if isinstance(config, GRPOConfig):
        from verl_ext.launch.grpo_check import check_rewards

        check_rewards(config)
    elif isinstance(config, BudgetConfig) and config.model.adapter is not None:
        Plugin.parse(config.model.adapter, "model.adapter")


def check_inputs(config: RunConfig, awaited: Sequence[Path] = ()) -> None:
    """Refuse a model, data and reward functions that cannot be used.

    Args:
        config: the resolved configuration.
        awaited: directories that are still to be prepared; what will be in them is not looked at.

    Raises:
        UserError: the first of them and how to fix it.
    """
    has_model = not is_within(config.model.partial_pretrain, awaited)
    files = [(key, name) for key in ("train_files", "val_files") for name in file_list(getattr(config.data, key))]
    here = [(key, name) for key, name in files if not is_within(name, awaited)]
    has_data = len(here) == len(files)
    if has_model:
        check_model(config)
    if config.stage in ("sft", "grpo"):
        if has_model and not has_custom_class(config):
            check_own_chat_template(config)
        if has_data:
            check_data(config)
        else:
            for key, name in here:
                check_parquet(Path(name).expanduser(), key, config)
    if isinstance(config, GRPOConfig):
        from verl_ext.grpo.rewards.check import check_judge, check_reward_functions
        from verl_ext.launch.grpo_check import check_length

        if has_model:
            check_length(config)
        check_judge(config.reward)
        if has_data:
            check_reward_functions(config.reward, config.data)
    elif isinstance(config, BudgetConfig):
        from verl_ext.launch.budget_check import check_budget_files

        check_budget_files(config, awaited)
    elif isinstance(config, VLMSFTConfig):
        from verl_ext.launch.question_check import check_questions

        check_questions(config, ("train",), awaited)


def check_run_directory(run_dir: Path) -> None:
    """The run directory must be writable, or its nearest parent that exists; nothing is created or changed.

    Raises:
        UserError: it cannot be created or written.
    """
    path = run_dir.absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        problem = f"{nearest} is not a directory"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"no permission to write into {nearest}"
    else:
        return check_kinds(path)
    raise UserError(f"the run directory {path} cannot be written ({problem}); set trainer.default_local_dir")


def check_kinds(run_dir: Path) -> None:
    """Where a run writes a file there must be no directory, and vice versa.

    Raises:
        UserError: there is.
    """
    for name in (*WRITTEN, TRACKER):
        is_directory = name.endswith("/")
        for path in run_dir.glob(name.rstrip("/")):
            if path.is_dir() != is_directory:
                found, wanted = ("not a directory", "directory") if is_directory else ("a directory", "file")
                raise UserError(f"{path} is {found}, but the run writes a {wanted} with that name; move or rename it")


def make_run_directory(run_dir: Path) -> None:
    """Create the run directory once nothing is left that could refuse the launch.

    Raises:
        UserError: the file system refuses.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the run directory {run_dir.absolute()} cannot be created ({error.strerror}); "
            "set trainer.default_local_dir"
        ) from error


def checkpoint_that_suits(config: RunConfig) -> Path | None:
    """The checkpoint that the ranks will resume; warnings are left to them, who look again.

    Raises:
        UserError: see `find_checkpoint` and `require_same_optimizer`.
    """
    trainer = config.trainer
    with_optimizer = "optimizer" in trainer.checkpoint.load_contents
    found = find_checkpoint(
        Path(trainer.default_local_dir),
        trainer.resume_mode,
        trainer.resume_from_path,
        warn=lambda sentence: None,
        with_optimizer=with_optimizer,
    )
    if found is not None and with_optimizer:
        require_same_optimizer(found, optimizer_name(config.optim))
    return found


def check_resume_path(trainer: TrainerConfig) -> None:
    """`resume_from_path`, if it is used, names a `global_step_N` directory."""
    path = trainer.resume_from_path
    if path is not None and trainer.resume_mode != "disable":
        if not Path(path).is_dir() or not Path(path).name.startswith("global_step_"):
            raise UserError(
                f"trainer.resume_from_path is '{path}', which is not a global_step_N directory; name one, or set it to "
                "null"
            )


def check_best_metric(name: str) -> None:
    """The best checkpoint can only be found by a metric that checkpoints hold."""
    describe(name)
    if not name.startswith(("train/", "val/")) and (not name.startswith("eval/") or name.count("/") > 1):
        raise UserError(f"trainer.checkpoint.best_metric is {name}; a checkpoint holds what its own training measured")
