"""Turns the arguments of a command into the configuration of the ranks; changes no file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from verl_ext.checkpoint.manifest import (
    BEST,
    EXPORT,
    UnreadableError,
    complete_checkpoints,
    exported_checkpoints,
    has_export,
    is_verl_checkpoint,
    list_checkpoints,
    newest_first,
    step_of,
)
from verl_ext.checkpoint.resume import find_checkpoint, require_same_optimizer, retry_reads
from verl_ext.cli import is_number
from verl_ext.commands import program
from verl_ext.config.compose import override_of
from verl_ext.config.recipes import default_recipe
from verl_ext.config.run_config import read_config_file, refuse_interpolations
from verl_ext.config.schema import as_dict, set_at, value_at, without_effect
from verl_ext.console import print_line, warn
from verl_ext.data.config import ChatDataConfig, PromptDataConfig, file_list
from verl_ext.errors import TransientError, UserError, first_line_of
from verl_ext.files import parse_json
from verl_ext.metrics.run_record import RunRecord
from verl_ext.model_files import is_hub_name
from verl_ext.paths import caller_directory
from verl_ext.trainer.stages import (
    STAGES,
    BudgetConfig,
    GRPOConfig,
    RunConfig,
    SFTConfig,
    chosen_recipe,
    composer_of,
    keys_set_by,
    load_config,
    sft_recipe_of,
)

VERL = "verl"
"""The recipe of verl's defaults."""
NO_INPUTS = ("data.train_files=none", "data.val_files=null", "model.partial_pretrain=none")
"""Replaces the paths in `~` among verl's defaults, for a user without a home directory."""
RUN_DIR_KEYS = {
    f"trainer.{key}" for key in ("default_local_dir", "project_name", "experiment_name", "resume_from_path")
}
"""Keys that determine which run a command resumes."""
PATHS = (
    "data.train_files", "data.val_files", "data.custom_cls.path", "model.partial_pretrain", "model.lora_adapter_path",
    "trainer.default_local_dir", "trainer.resume_from_path",
)  # fmt: skip
OTHER_INPUTS = ("model.sft_run", "controller.init_from", "controller.importance_file", "latency.file")
"""Further paths, of stages that verl does not have."""


def configure(arguments: argparse.Namespace) -> RunConfig:
    """Return the configuration, with the number of ranks and the paths of converted data filled in.

    Raises:
        UserError: see `load_config`; or the number of ranks is missing, NNODES is malformed, data cannot be read, or a
            resolved value has `${`.
    """
    config = resolve_config(arguments.command, arguments.overrides)
    set_num_ranks(config, arguments)
    config.trainer.trace |= arguments.trace
    for sentence in convert_data_files(config, arguments.overrides):
        print_line(sentence, sys.stderr if arguments.print_config else None)
    refuse_interpolations(as_dict(config))
    return config


def set_num_ranks(config: RunConfig, arguments: argparse.Namespace) -> None:
    """Fill in the number of nodes and of ranks per node; refuse keys that contradict them."""
    if arguments.num_processes is None and not (arguments.print_config or arguments.show_samples):
        raise UserError(f"the number of ranks is missing; for example: `{program(arguments.command)} 2`")
    ranks = {"nnodes": num_nodes(), "n_gpus_per_node": arguments.num_processes or config.trainer.n_gpus_per_node}
    typed = keys_set_by(config.stage, arguments.overrides)
    given_by = {"nnodes": "NNODES (the number of nodes)", "n_gpus_per_node": "the first argument (ranks per node)"}
    for name, number in ranks.items():
        value = getattr(config.trainer, name)
        if f"trainer.{name}" in typed and value != number:
            raise UserError(f"trainer.{name}={value} contradicts {given_by[name]}, which is {number}; omit this key")
    config.trainer.nnodes, config.trainer.n_gpus_per_node = ranks.values()


def num_nodes() -> int:
    """Return the number of nodes, from NNODES.

    Raises:
        UserError: NNODES, NODE_RANK or MASTER_PORT has an invalid value.
    """
    nodes = os.environ.get("NNODES", "1")
    if not is_number(nodes, 1):
        raise UserError(f"NNODES is '{nodes}'; it must be the number of nodes")
    node = os.environ.get("NODE_RANK", "0")
    if not is_number(node, 0, int(nodes) - 1):
        raise UserError(f"NODE_RANK is '{node}'; with NNODES={nodes} it must be from 0 to {int(nodes) - 1}")
    port = os.environ.get("MASTER_PORT", "29500")
    if not is_number(port, 1, 65535):
        raise UserError(f"MASTER_PORT is '{port}'; it must be a free port of the first node")
    return int(nodes)


def is_first_node() -> bool:
    """Whether this is the first of the nodes, from NODE_RANK, which `num_nodes` checks."""
    return int(os.environ.get("NODE_RANK", "0")) == 0


# The recipe `verl`: commands written for verl's own trainer


def resolve_config(command: str, overrides: list[str]) -> RunConfig:
    """Return the configuration; without `recipe=`, verl's defaults apply to a run that verl itself started.

    Otherwise the default recipe would change keys that the same command left at verl's defaults.

    Raises:
        UserError: see `load_config`.
    """
    names_recipe = any(word.startswith("recipe=") for word in overrides)
    if command == "sft" and overrides and not names_recipe and (run_dir := run_dir_of_verl(overrides)) is not None:
        print_line(
            f"No recipe= given, and {run_dir} was started by verl: using recipe={VERL} (verl's defaults).", sys.stderr
        )
        return with_paths_of_caller(load_config("sft", [f"recipe={VERL}", *overrides]))
    config = load_config(command, overrides)
    if names_recipe and config.recipe == VERL:
        return with_paths_of_caller(config)
    if unknown := composer_of(config.stage).unknown_keys_added_by(overrides):
        print_line(f"Keys added with + have no effect unless custom code reads them: {', '.join(unknown)}", sys.stderr)
    for sentence in without_effect(config):
        warn(sentence)
    return with_inputs_of_caller(config)


def run_dir_of_verl(overrides: list[str]) -> Path | None:
    """Return the run directory of a command without `recipe=` if verl itself started that run."""
    composer = composer_of("sft")
    try:
        of_run_dir = [word for word in overrides if composer.keys_set_by([word]) & RUN_DIR_KEYS]
        trainer = with_paths_of_caller(load_config("sft", [f"recipe={VERL}", *NO_INPUTS, *of_run_dir])).trainer
    except UserError:  # the overrides are invalid, or refer to keys of the recipe that applies, which is loaded next
        return None
    return trainer.run_dir if was_started_by_verl(trainer.run_dir, trainer.resume_from_path) else None


def was_started_by_verl(run_dir: Path, resume_from_path: str | None) -> bool:
    """Whether the run resumes from a checkpoint that verl wrote, or has done so before."""
    with suppress(UserError):  # the record is missing or damaged
        if RunRecord(run_dir).read()["recipe"] == VERL:
            return True
    named = [Path(resume_from_path)] if resume_from_path is not None else []
    return any(is_verl_checkpoint(path) for path in [*list_checkpoints(run_dir), *named])


def with_paths_of_caller(config: RunConfig) -> RunConfig:
    """Resolve relative paths from the caller's directory; the scripts change to the repository."""
    caller = caller_directory()
    return with_paths(config, PATHS, lambda key, path: key != "model.partial_pretrain" or (caller / path).is_dir())


def with_inputs_of_caller(config: RunConfig) -> RunConfig:
    """Resolve relative paths of inputs that exist in the caller's directory and not in the repository."""
    caller = caller_directory()
    inputs = [key for key in (*PATHS, *OTHER_INPUTS) if key != "trainer.default_local_dir"]
    return with_paths(config, inputs, lambda key, path: not Path(path).exists() and (caller / path).exists())


def with_paths(config: RunConfig, keys: Iterable[str], is_of_caller: Callable[[str, str], bool]) -> RunConfig:
    """Resolve relative paths from the caller's directory.

    Args:
        config: is modified.
        keys: settings that hold a path or a list of paths; those that the stage lacks are skipped.
        is_of_caller: whether to resolve a path, given its key and itself.
    """

    def from_caller(key: str, path: str) -> str:
        is_fixed = "://" in path or path.startswith(("/", "~"))
        return str(caller_directory() / path) if not is_fixed and is_of_caller(key, path) else path

    for key in keys:
        value = value_at(config, key)
        if value is not None:
            paths = [from_caller(key, path) for path in file_list(value)]
            set_at(config, key, paths[0] if isinstance(value, str) else paths)
    return config


# Data in JSON or CSV


def convert_data_files(config: RunConfig, overrides: Sequence[str]) -> list[str]:
    """Replace data files that must be converted (`is_raw`), and prepend their conversion to `prepare`.

    Returns:
        A sentence for each key whose files are converted.

    Raises:
        UserError: a file cannot be read, or a setting does not apply to such files.
    """
    if not isinstance(config, SFTConfig | GRPOConfig) or has_custom_class(config):
        return []
    has_val_files = sets_val_files(config, overrides)
    if not config.data.raw_files(config.prepare):
        if not has_val_files and config.recipe != VERL:
            refuse_val_files_of_other_data(config.data)
        return []
    from verl_ext.data.prepare.recipe_commands import convert_raw_files

    commands, sentences = convert_raw_files(config.data, has_val_files)
    config.prepare = [*commands, *config.prepare]
    return sentences


def refuse_val_files_of_other_data(data: ChatDataConfig | PromptDataConfig) -> None:
    """Refuse validation files of the recipe that are not next to the training files, which the recipe does not name.

    Raises:
        UserError: names both.
    """
    train, val = file_list(data.train_files), file_list(data.val_files)
    places, val_places = ([Path(name).expanduser().resolve() for name in names] for names in (train, val))
    has_train = all(path.is_file() for path in places)  # otherwise another check says so
    if val and has_train and {path.parent for path in places}.isdisjoint(path.parent for path in val_places):
        raise UserError(
            f"data.val_files={','.join(val)}, set by the recipe or by default, does not belong to "
            f"data.train_files={','.join(train)}; set data.val_files to a file of yours, or to null"
        )


def has_custom_class(config: RunConfig) -> bool:
    """Whether a user's dataset class reads the data."""
    return isinstance(config, SFTConfig) and config.data.custom_cls.path is not None


def sets_val_files(config: RunConfig, overrides: Sequence[str]) -> bool:
    """Whether `data.val_files` is set on the command line, or in the recipe that also sets `data.train_files`.

    A recipe's validation set does not belong to other training data that the command line names.
    """
    typed = keys_set_by(config.stage, overrides)
    if {"data.train_files", "data.val_files"} & typed:
        return "data.val_files" in typed
    _, content, _ = chosen_recipe(STAGES[config.stage].command, overrides)
    return "val_files" in content.get("data", {})


# The checkpoint or model to start from


def resume_candidate(config: RunConfig) -> Path | None:
    """Return the checkpoint that the ranks will resume; None to start at step 0. Only the ranks print warnings.

    Raises:
        TransientError, UserError: see `find_checkpoint` and `require_same_optimizer`.
    """
    trainer = config.trainer
    with_optimizer = "optimizer" in trainer.checkpoint.load_contents
    found = retry_reads(
        lambda: find_checkpoint(
            trainer.run_dir,
            trainer.resume_mode,
            trainer.resume_from_path,
            warn=lambda sentence: None,
            with_optimizer=with_optimizer,
        )
    )
    if found is not None and with_optimizer:
        require_same_optimizer(found, config.optim.class_name)
    return found


def resolve_model(config: GRPOConfig | BudgetConfig) -> None:
    """Fill in `model.partial_pretrain` if it is null: the model that the run started from, or an export of the SFT run.

    The stage grpo uses the best checkpoint if an evaluation has chosen one, and the newest otherwise. The stage budget
    uses the newest, because no evaluation compares vision-language models.

    Raises:
        UserError: there is no such checkpoint, or it has no export.
    """
    model = config.model
    if model.partial_pretrain is not None:
        if model.sft_run is not None:
            print_line(f"model.partial_pretrain={model.partial_pretrain} takes precedence over model.sft_run")
        return
    if model.sft_run is None:
        raise UserError(
            "no model to start from is given; set model.sft_run=RUN_DIRECTORY of an SFT run, or model.partial_pretrain"
        )
    sft_run = Path(model.sft_run).expanduser()
    initial_model = _initial_model_of_run(config, sft_run)
    if initial_model is not None:
        model.partial_pretrain = initial_model
    elif config.stage == "grpo" and (sft_run / BEST).exists():
        model.partial_pretrain = str(best_export(sft_run))
    else:
        export = newest_export(sft_run, config.trainer.n_gpus_per_node)
        resumes = config.trainer.resume_from_path is not None and config.trainer.resume_mode != "disable"
        if config.stage == "grpo" and not resumes:
            print_line(
                f"{sft_run} has not been evaluated; starting from its newest checkpoint, {export.parent.name} "
                f"(`{program('eval')} watch {shlex.quote(str(sft_run))}` chooses the best one)"
            )
        model.partial_pretrain = str(export)


def _initial_model_of_run(config: RunConfig, sft_run: Path) -> str | None:
    """The model that this run started from, even if another is now the best; None if there is nothing to resume."""
    run_dir = config.trainer.run_dir
    path = run_dir / "config.yaml"
    if config.trainer.resume_mode == "disable" or not path.is_file() or not list_checkpoints(run_dir):
        return None
    recorded = read_config_file(path).get("model")
    if not isinstance(recorded, dict):
        raise UserError(f"{path} has no section 'model'; restore it, or start another run with trainer.experiment_name")
    if not recorded.get("sft_run") or Path(recorded["sft_run"]).expanduser().resolve() != sft_run.resolve():
        return None
    model: str | None = recorded["partial_pretrain"]
    is_path = model is not None and not is_hub_name(model) and "://" not in model
    if is_path and not (Path(str(model)).expanduser() / "config.json").is_file():
        raise UserError(
            f"this run started from {model}, which no longer exists; set model.partial_pretrain to a copy of "
            "it, or start a new run under another trainer.experiment_name"
        )
    return model


def best_export(run_dir: Path) -> Path:
    """Return the export of the checkpoint that a run's `best_checkpoint.json` names.

    Raises:
        UserError: the file cannot be read or names no checkpoint of the run, or that checkpoint has no export.
    """
    path = run_dir / BEST
    try:
        name = parse_json(path.read_bytes())["checkpoint"]
        if step_of(Path(name)) is None or Path(name).name != name:
            raise ValueError(f"{name!r} is not a checkpoint of the run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not name the best checkpoint ({first_line_of(error)}); delete it to start from the newest "
            f"checkpoint, or choose one with model.partial_pretrain={run_dir}/global_step_N/{EXPORT}"
        ) from error
    if not has_export(run_dir / name):
        raise UserError(
            f"the best checkpoint, {run_dir / name}, has no model weights in {EXPORT}/; write them with "
            f"`{program('checkpoint')} export {shlex.quote(str(run_dir / name))}`, or set model.partial_pretrain"
        )
    return run_dir / name / EXPORT


def newest_export(run_dir: Path, num_ranks: int) -> Path:
    """Return the export of the newest complete checkpoint of an SFT run that has one.

    Raises:
        TransientError: a newer checkpoint that may be intact cannot be read.
        UserError: there is none; the message gives the command that creates it, on `num_ranks` ranks.
    """

    def refuse_unreadable(checkpoint: Path, error: ValueError) -> None:
        if isinstance(error, UnreadableError):  # an older export would replace it for the whole run
            raise TransientError(
                f"{checkpoint} may be intact, but {error}; start the same command again when the file system answers, "
                f"or choose a checkpoint with model.partial_pretrain={run_dir}/global_step_N/{EXPORT}"
            )

    for checkpoint, is_usable in exported_checkpoints(run_dir, refuse_unreadable):
        if not is_usable:
            raise UserError(
                f"{checkpoint} has no complete {EXPORT}/, because its run was stopped or a file is damaged; write it "
                f"with `{program('checkpoint')} export {shlex.quote(str(checkpoint))}`, or finish the run"
            )
        return checkpoint / EXPORT
    if complete := newest_first(run_dir, complete_checkpoints(run_dir)):
        raise UserError(
            f"no checkpoint of model.sft_run={run_dir} has model weights in {EXPORT}/; write them with "
            f"`{program('checkpoint')} export {shlex.quote(str(complete[0]))}`, or set model.partial_pretrain"
        )
    command = sft_command(run_dir, num_ranks)
    train_it = "specify the run directory of an SFT run" if command is None else f"train it first with `{command}`"
    what = "has no complete checkpoint" if run_dir.is_dir() else "does not exist"
    raise UserError(f"model.sft_run={run_dir} {what}; {train_it}, or set model.partial_pretrain")


def sft_command(run_dir: Path, num_ranks: int) -> str | None:
    """Return the command that trains the SFT run of a directory; None if no recipe in `recipes/sft/` names it."""
    recipe = sft_recipe_of(run_dir)
    if recipe is None:
        return None
    words = [str(num_ranks)]
    if recipe.stem != default_recipe("sft"):
        words.append(f"recipe={recipe.stem}")
    if run_dir.resolve() != Path("checkpoints", *run_dir.parts[-2:]).resolve():
        words.append(override_of("trainer.default_local_dir", str(run_dir)))
    return f"{program('sft')} {shlex.join(words)}"
