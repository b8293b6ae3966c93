"""The model that a run of the command grpo goes on from."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.checkpoint.layout import BEST, EXPORT, list_steps, step_of, what_is_wrong
from verl_ext.checkpoint.lease import leased
from verl_ext.config.compose import STAGES
from verl_ext.config.written import load_written
from verl_ext.errors import UserError, first_line_of
from verl_ext.tell import tell


def settle_model(config: DictConfig) -> None:
    """Fill in `model.partial_pretrain` where it is null: an export of the SFT run, or what this run began from.

    The stage grpo takes the best checkpoint, which an evaluation chose; the stage budget the newest, for no evaluation
    chooses among vision-language models.

    Raises:
        UserError: there is no such checkpoint, or it has no export.
    """
    model = config.model
    if model.partial_pretrain is not None:
        if model.sft_run is not None:
            tell(f"model.partial_pretrain={model.partial_pretrain} goes before model.sft_run, which is not used")
        return
    if model.sft_run is None:
        raise UserError(
            "nothing says what to go on from; give model.sft_run=RUN_DIRECTORY of an SFT run, or model.partial_pretrain"
        )
    sft_run = Path(model.sft_run).expanduser()
    choose = best_export if config.stage == "grpo" else newest_export
    model.partial_pretrain = _begun_from(config, sft_run) or str(choose(sft_run))


def _begun_from(config: DictConfig, sft_run: Path) -> str | None:
    """What this run began from, whatever is the best by now; None for one that begins."""
    begun = Path(config.trainer.default_local_dir) / "config.yaml"
    if config.trainer.resume_mode == "disable" or not begun.is_file():
        return None
    former = load_written(begun).model
    if not former.get("sft_run") or Path(former.sft_run).expanduser().resolve() != sft_run.resolve():
        return None
    if former.partial_pretrain and not (Path(former.partial_pretrain) / "config.json").is_file():
        raise UserError(
            f"this run began from {former.partial_pretrain}, which is gone; give a copy of it as "
            "model.partial_pretrain, or begin anew under another trainer.experiment_name"
        )
    return former.partial_pretrain


def best_export(run_dir: Path) -> Path:
    """The export of a run's best checkpoint.

    Raises:
        UserError: nothing was chosen there, or it has no export.
    """
    path = run_dir / BEST
    if not run_dir.is_dir():
        raise UserError(
            f"model.sft_run={run_dir} is not a directory; name that of an SFT run, or give model.partial_pretrain"
        )
    try:
        name = json.loads(path.read_text())["checkpoint"]
        if step_of(Path(name)) is None or Path(name).name != name:
            raise ValueError(f"{name!r} is no checkpoint of the run")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not tell the best checkpoint ({first_line_of(error)}); train with eval.watch=true, run "
            f"`bash eval_pipeline/run.sh watch {run_dir}`, or give model.partial_pretrain"
        ) from error
    export = run_dir / str(name) / EXPORT
    if not (export / "config.json").is_file():
        raise UserError(
            f"the best checkpoint {run_dir / str(name)} has no export; make it by `python -m verl_ext.checkpoint "
            f"export {run_dir / str(name)}`, or give model.partial_pretrain"
        )
    return export


def newest_export(run_dir: Path) -> Path:
    """The export of a run's newest checkpoint that has one.

    Raises:
        UserError: none has.
    """
    for checkpoint in list_steps(run_dir):
        if what_is_wrong(checkpoint) is None and (checkpoint / EXPORT / "config.json").is_file():
            return checkpoint / EXPORT
    raise UserError(
        f"{run_dir} has no checkpoint with an export; train the model there by run_sft.sh, or give "
        "model.partial_pretrain"
    )


@contextmanager
def holding_model(config: DictConfig) -> Iterator[None]:
    """Keep the checkpoint that the run begins from out of its own run's rotation meanwhile."""
    export = Path(str(config.model.partial_pretrain)).expanduser() if config.stage in STAGES["grpo"] else None
    if export is None or export.name != EXPORT or step_of(export.parent) is None:
        yield
        return
    with ExitStack() as stack:
        try:
            stack.enter_context(leased(export.parent))
        except OSError as error:  # another user's, say
            tell(f"{export.parent} cannot be kept from being removed ({error.strerror}); a resume will need it")
        yield
