"""Which checkpoint a run goes on from. Standard library only, so that the launcher can ask before torchrun starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from verl_ext.checkpoint.layout import Manifest, list_steps, read_tracker, step_of, what_is_wrong
from verl_ext.errors import UserError

Warn = Callable[[str], None]


def find_checkpoint(run_dir: Path, resume_mode: str, resume_from_path: str | None, warn: Warn) -> Path | None:
    """The checkpoint to resume from.

    Args:
        run_dir: holds `global_step_N` directories.
        resume_mode: auto, disable or resume_path, as in verl.
        resume_from_path: a `global_step_N` directory to begin from; in mode auto a newer one of the run itself goes
            before it.
        warn: receives a sentence when the newest checkpoint or the tracker is not what it should be.

    Returns:
        The directory of a complete checkpoint, or None to start at step 0.

    Raises:
        UserError: `resume_from_path` is no complete checkpoint, or there are checkpoints of which none is complete.
    """
    if resume_mode == "disable":
        return None
    if resume_from_path is not None:
        path = Path(resume_from_path)
        if problem := what_is_wrong(path):
            raise UserError(f"trainer.resume_from_path {path} cannot be resumed: {problem}; name another checkpoint")
        own = newest_complete(run_dir, warn) if resume_mode == "auto" else None
        # A restart must not throw away what the run has done since it began from that path.
        return own if own is not None and (step_of(own) or 0) > (step_of(path) or 0) else path
    return newest_complete(run_dir, warn)


def newest_complete(run_dir: Path, warn: Warn) -> Path | None:
    """The tracker's checkpoint if it is complete, else the newest complete one; see `find_checkpoint`."""
    candidates = list_steps(run_dir)
    if not candidates:
        return None
    tracked, tracker_problem = read_tracker(run_dir)
    if tracker_problem:
        warn(f"the tracker file {tracker_problem}; looking for the newest complete checkpoint instead")
    ordered = ([tracked] if tracked else []) + [path for path in candidates if path != tracked]
    problems = []
    for path in ordered:
        problem = what_is_wrong(path)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        warn(f"{path.name} cannot be resumed: {problem}; trying an older one")
    raise UserError(
        f"{run_dir} holds checkpoints but none is complete ({'; '.join(problems)}); restore one, move the "
        "directory away, or start at step 0 with trainer.resume_mode=disable"
    )


def require_world_size(checkpoint: Path, world_size: int) -> None:
    """Refuse a checkpoint that another number of ranks wrote: each rank loads the shard that it saved."""
    written = Manifest.read(checkpoint).world_size
    if written != world_size:
        raise UserError(
            f"{checkpoint} was written by {written} ranks and this run has {world_size}; "
            f"start it with {written}, or give another trainer.experiment_name"
        )
