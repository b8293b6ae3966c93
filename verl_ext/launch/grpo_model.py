"""The model that a run of the command grpo starts from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from verl_ext.checkpoint.layout import BEST, EXPORT, list_steps, read_all_complete, step_of
from verl_ext.checkpoint.lease import leased
from verl_ext.commands import program
from verl_ext.config.recipes import default_recipe
from verl_ext.config.run_config import read_config_file
from verl_ext.console import print_line
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json
from verl_ext.model_files import is_hub_name
from verl_ext.trainer.stages import BudgetConfig, GRPOConfig, RunConfig, sft_recipe_of


def settle_model(config: GRPOConfig | BudgetConfig) -> None:
    """Fill in `model.partial_pretrain` where it is null: an export of the SFT run, or the one that this run began from.

    The stage grpo takes the best checkpoint if an evaluation has chosen one, and the newest otherwise. The stage budget
    takes the newest, since no evaluation compares vision-language models.

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
    begun_from = _begun_from(config, sft_run)
    if begun_from is not None:
        model.partial_pretrain = begun_from
    elif config.stage == "grpo" and (sft_run / BEST).exists():
        model.partial_pretrain = str(best_export(sft_run))
    else:
        export = newest_export(sft_run, config.trainer.n_gpus_per_node)
        if config.stage == "grpo":
            print_line(
                f"{sft_run} has not been evaluated; starting from its newest checkpoint, {export.parent.name} "
                f"(`bash eval_pipeline/run.sh watch {sft_run}` chooses the best one)"
            )
        model.partial_pretrain = str(export)


def _begun_from(config: RunConfig, sft_run: Path) -> str | None:
    """The model that this run began from, even if another is the best by now; None if there is nothing to resume."""
    run_dir = Path(config.trainer.default_local_dir)
    begun = run_dir / "config.yaml"
    if config.trainer.resume_mode == "disable" or not begun.is_file() or not list_steps(run_dir):
        return None
    former = read_config_file(begun).get("model")
    if not isinstance(former, dict):
        raise UserError(f"{begun} has no section 'model'; restore it, or start another run by trainer.experiment_name")
    if not former.get("sft_run") or Path(former["sft_run"]).expanduser().resolve() != sft_run.resolve():
        return None
    model: str | None = former["partial_pretrain"]
    is_path = model is not None and not is_hub_name(model) and "://" not in model
    if is_path and not (Path(str(model)).expanduser() / "config.json").is_file():
        raise UserError(
            f"this run began from {model}, which is gone; set model.partial_pretrain to a copy of "
            "it, or start a new run under another trainer.experiment_name"
        )
    return model


def best_export(run_dir: Path) -> Path:
    """The export of the checkpoint that a run's `best_checkpoint.json` names.

    Raises:
        UserError: the file cannot be read or names no checkpoint of the run, or that checkpoint has no export.
    """
    path = run_dir / BEST
    try:
        name = parse_json(path.read_bytes())["checkpoint"]
        if step_of(Path(name)) is None or Path(name).name != name:
            raise ValueError(f"{name!r} is no checkpoint of the run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not name the best checkpoint ({first_line_of(error)}); delete it to start from the newest "
            f"checkpoint, or choose one with model.partial_pretrain={run_dir}/global_step_N/{EXPORT}"
        ) from error
    if not has_export(run_dir / name):
        raise UserError(
            f"the best checkpoint, {run_dir / name}, has no model weights in {EXPORT}/; write them with "
            f"`{program('checkpoint')} export {run_dir / name}`, or set model.partial_pretrain"
        )
    return run_dir / name / EXPORT


def newest_export(run_dir: Path, num_ranks: int) -> Path:
    """The export of a run's newest complete checkpoint that has one.

    Args:
        run_dir: of the SFT run.
        num_ranks: ranks of this command, for the command that trains the model.

    Raises:
        UserError: there is none; the message has the command that makes it.
    """
    complete = list(read_all_complete(run_dir))
    for checkpoint in complete:
        if has_export(checkpoint):
            return checkpoint / EXPORT
    if complete:
        raise UserError(
            f"no checkpoint of model.sft_run={run_dir} has model weights in {EXPORT}/; write them with "
            f"`{program('checkpoint')} export {complete[0]}`, or set model.partial_pretrain"
        )
    command = training_command(run_dir, num_ranks)
    train_it = "name the run directory of an SFT run" if command is None else f"train it first with `{command}`"
    what = "has no complete checkpoint" if run_dir.is_dir() else "does not exist"
    raise UserError(f"model.sft_run={run_dir} {what}; {train_it}, or set model.partial_pretrain")


def has_export(checkpoint: Path) -> bool:
    """Whether `huggingface/` has weights; configuration and tokenizer are there in any case."""
    return any((checkpoint / EXPORT).glob("*.safetensors"))


def training_command(run_dir: Path, num_ranks: int) -> str | None:
    """The command that trains the run of a directory, None if no recipe in `recipes/sft/` has its names.

    Args:
        run_dir: of the SFT run.
        num_ranks: ranks on each machine.
    """
    recipe = sft_recipe_of(run_dir)
    if recipe is None:
        return None
    words = [str(num_ranks)]
    if recipe.stem != default_recipe("sft"):
        words.append(f"recipe={recipe.stem}")
    if run_dir.resolve() != Path("checkpoints", *run_dir.parts[-2:]).resolve():
        words.append(f"trainer.default_local_dir={run_dir}")
    return f"{program('sft')} {shlex.join(words)}"


@contextmanager
def holding_model(config: RunConfig) -> Iterator[None]:
    """Keep the checkpoint that the run begins from out of its own run's rotation meanwhile."""
    follows_sft = isinstance(config, GRPOConfig | BudgetConfig)
    export = Path(str(config.model.partial_pretrain)).expanduser() if follows_sft else None
    if export is None or export.name != EXPORT or step_of(export.parent) is None:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(leased(export.parent))
        except OSError as error:  # another user's, say
            print_line(f"{export.parent} cannot be kept from being removed ({error.strerror}); a resume will need it")
        yield
