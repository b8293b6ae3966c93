"""Which checkpoint a run goes on from. Standard library only, so that the launcher can ask before torchrun starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from verl_ext.checkpoint.layout import (
    TRACKER,
    Manifest,
    list_steps,
    read_complete,
    read_tracker,
    step_of,
    what_is_wrong,
)
from verl_ext.checkpoint.stock import KINDS, is_stock
from verl_ext.errors import UserError

CONTENTS = ("model", "optimizer", "extra")
"""What `load_contents` calls the `KINDS` of shards."""
Warn = Callable[[str], None]


def find_checkpoint(
    run_dir: Path,
    resume_mode: str,
    resume_from_path: str | None,
    warn: Warn,
    *,
    with_optimizer: bool = True,
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> Path | None:
    """The checkpoint to resume from.

    Args:
        run_dir: holds `global_step_N` directories.
        resume_mode: auto, disable or resume_path, as in verl.
        resume_from_path: a `global_step_N` directory to begin from; in mode auto a newer one of the run itself goes
            before it.
        warn: receives a sentence when the newest checkpoint or the tracker is not what it should be.
        with_optimizer: whether the optimizer's state is wanted too.
        damaged: what is already known to be wrong, by checkpoint.

    Returns:
        The directory of a complete checkpoint, or None to start at step 0.

    Raises:
        UserError: `resume_from_path` is no complete checkpoint, or there are checkpoints of which none is complete.
    """
    if resume_mode == "disable":
        return None

    def why_not(path: Path) -> str | None:
        if path in damaged:
            return damaged[path]
        try:
            manifest = read_complete(path)
        except ValueError as error:
            return str(error)
        return optimizer_is_missing(path, manifest) if with_optimizer else None

    if resume_from_path is not None:
        path = Path(resume_from_path)
        if problem := why_not(path):
            raise UserError(f"trainer.resume_from_path {path} cannot be resumed: {problem}; name another checkpoint")
        own = newest_complete(run_dir, warn, why_not) if resume_mode == "auto" else None
        # A restart must not throw away what the run has done since it began from that path.
        return own if own is not None and (step_of(own) or 0) > (step_of(path) or 0) else path
    return newest_complete(run_dir, warn, why_not)


def optimizer_is_missing(path: Path, manifest: Manifest) -> str | None:
    """Why a complete checkpoint lacks its optimizer, None when it has it."""
    if "optimizer" not in manifest.dropped:
        return None
    if is_stock(path):
        return (
            "verl saved it without the optimizer; leave it out of trainer.checkpoint.load_contents to begin a new one"
        )
    return "its optimizer shards were dropped when it was kept as best (trainer.checkpoint.drop_optimizer_of_best)"


def optimizer_name(optim: Any) -> str:
    """The class of the optimizer that the section `optim` of a configuration names."""
    return f"{optim.optimizer_impl}.{optim.optimizer}"


def require_same_optimizer(checkpoint: Path, optimizer: str) -> None:
    """Refuse to load the state of one optimizer into another.

    Args:
        checkpoint: a complete `global_step_N`; of an older one, which does not name its optimizer, the shards tell.
        optimizer: this run's, see `optimizer_name`.

    Raises:
        UserError: it was another.
    """
    saved = Manifest.read(checkpoint).optimizer
    if saved and saved != optimizer:
        raise another_optimizer(checkpoint, f"of {saved}, but this run uses {optimizer}")


def contents_to_load(checkpoint: Path, trainer: Any, optimizer: str) -> list[str]:
    """What is loaded of a checkpoint.

    `load_contents` is for the checkpoint that a run begins from. A requeue repeats it, and must not drop the optimizer
    state that the run has saved since. So what the run itself saved with this optimizer is loaded whole, unless
    `resume_from_path` names it.

    Args:
        checkpoint: as `find_checkpoint` gave it.
        trainer: the section of the configuration.
        optimizer: this run's, see `optimizer_name`.

    Raises:
        ValueError: its manifest cannot be read.
    """
    asked, manifest = list(trainer.checkpoint.load_contents), Manifest.read(checkpoint)
    is_named = trainer.resume_from_path is not None and checkpoint == Path(trainer.resume_from_path)
    if is_named or manifest.optimizer != optimizer or "optimizer" in manifest.dropped:
        return asked
    saved = {name.partition("_world_size_")[0] for name in manifest.files}
    return asked + [name for name, kind in zip(CONTENTS, KINDS) if kind in saved and name not in asked]


def another_optimizer(checkpoint: Path, how: str) -> UserError:
    """Why the state of an optimizer cannot be loaded, and how to continue."""
    return UserError(
        f"{checkpoint} holds the optimizer state {how}; restore the optim section of the configuration, or set "
        "trainer.checkpoint.load_contents=[model] to load only the weights and start a new optimizer and schedule, "
        "which later starts resume"
    )


def newest_complete(run_dir: Path, warn: Warn, why_not: Callable[[Path], str | None]) -> Path | None:
    """The tracker's checkpoint if it can be resumed, else the newest that can; see `find_checkpoint`."""
    candidates = list_steps(run_dir)
    if not candidates:
        return None
    problems = []
    for path in in_order_of_trust(run_dir, candidates, warn):
        problem = why_not(path)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        warn(f"{path.name} cannot be resumed: {problem}; trying an older one")
    raise UserError(
        f"{run_dir} has checkpoints but none is complete ({'; '.join(problems)}); restore one, move the "
        "directory away, or start at step 0 with trainer.resume_mode=disable"
    )


def in_order_of_trust(run_dir: Path, candidates: list[Path], warn: Warn) -> list[Path]:
    """What was completed after the tracker was last written, then the tracker's, then the others, newest first."""
    tracked, tracker_problem = read_tracker(run_dir)
    if tracker_problem:
        warn(f"the tracker file {tracker_problem}; looking for the newest complete checkpoint instead")
    if tracked is None:
        return candidates
    # A crash between renaming a checkpoint and replacing the tracker. A tracker that was set back by hand is younger
    # than every checkpoint, and so are those of a former run in the same directory older than the tracker.
    written = (run_dir / TRACKER).stat().st_mtime
    later = [path for path in candidates if (step_of(path) or 0) > (step_of(tracked) or 0) and saved_at(path) > written]
    if later and what_is_wrong(later[0]) is None:
        warn(f"the tracker names {tracked.name}, but {later[0].name} was completed after it; resuming from that")
    return [*later, tracked, *(path for path in candidates if path != tracked and path not in later)]


def saved_at(path: Path) -> float:
    """When a checkpoint was saved, in seconds since 1970; 0 for one without a readable manifest."""
    try:
        return Manifest.read(path).time
    except ValueError:
        return 0.0
