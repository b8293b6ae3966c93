"""Which checkpoint a run resumes from, and what it loads.

Importing this module does not import torch, because the launcher looks for the checkpoint before torchrun starts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, TypeVar

from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.manifest import (
    DERIVED,
    DROPPED_OPTIMIZER,
    KINDS,
    MANIFEST,
    FileEntry,
    Manifest,
    UnreadableError,
    damaged_files,
    is_verl_checkpoint,
    list_checkpoints,
    newest_first,
    read_complete,
    read_tracker,
    step_of,
    why_incomplete,
    write_tracker,
)
from verl_ext.console import Warn, print_line, warn
from verl_ext.errors import TransientError, UserError, first_line_of

T = TypeVar("T")
CONTENTS = ("model", "optimizer", "extra")
"""Names of the `KINDS` of shards in `load_contents`."""
PAUSES_S = (1.0, 4.0, 15.0)
"""Waiting times before a read is repeated after an error that may be transient."""


class ResumeConfig(Protocol):
    """The `trainer` keys that determine where a run resumes; properties, so that any subtype fits."""

    @property
    def run_dir(self) -> Path: ...
    @property
    def resume_mode(self) -> str: ...
    @property
    def resume_from_path(self) -> str | None: ...
    @property
    def checkpoint(self) -> CheckpointConfig: ...


# Errors of the file system that may be transient


def retry_reads(function: Callable[[], T]) -> T:
    """Call a function that reads checkpoints, several times if it raises a `TransientError`."""
    for pause_s in PAUSES_S:
        try:
            return function()
        except TransientError:
            time.sleep(pause_s)
    return function()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise a `TransientError` if the block cannot read a checkpoint or run directory.

    An intact checkpoint must not be skipped: the run would replace all later steps, and rotation would remove it.
    """
    try:
        yield
    except (UnreadableError, OSError) as error:
        why = f"it cannot be read ({first_line_of(error)})" if isinstance(error, OSError) else str(error)
        raise TransientError(
            f"{path} may be intact, but {why}; start the same command again when the file system answers, or, if the "
            "file is lost, move this directory away"
        ) from error


# All ranks together


def agree_on_checkpoint(config: ResumeConfig, optimizer: str) -> Path | None:
    """Choose the newest undamaged checkpoint, and print verl's message `Found checkpoint: ...`; collective.

    Raises:
        TransientError: a checkpoint that may be intact cannot be read.
        UserError: see `find_checkpoint` and `require_same_optimizer`.
    """
    from verl_ext.distributed import on_rank_zero

    with_optimizer = "optimizer" in config.checkpoint.load_contents
    damaged: dict[Path, str] = {}
    warn_once = cache(warn)  # the search restarts after each damaged checkpoint

    def find() -> Path | None:
        return find_checkpoint(
            config.run_dir,
            config.resume_mode,
            config.resume_from_path,
            warn_once,
            with_optimizer=with_optimizer,
            damaged=damaged,
        )

    while (path := on_rank_zero(lambda: retry_reads(find))) is not None and config.checkpoint.verify:
        problems = verify_on_all_ranks(path)
        if not problems:
            break
        damaged[path] = next(f"its file {name} {problem}" for name, problem in sorted(problems.items()))
    if path is None:
        return None

    def accept() -> None:
        if with_optimizer:
            require_same_optimizer(path, optimizer)
        _catch_up_tracker(path, config.run_dir)
        print_line(f"Found checkpoint: {path.absolute()}", sys.__stdout__)

    on_rank_zero(accept)
    return path


def agree_on_contents(checkpoint: Path, config: ResumeConfig, optimizer: str) -> list[str]:
    """Choose what to load from a checkpoint; rank 0 prints deviations from the default; collective."""
    from verl_ext.distributed import on_rank_zero

    def choose() -> list[str]:
        asked = list(config.checkpoint.load_contents)
        contents = contents_to_load(checkpoint, config, optimizer)
        loaded = ", ".join(name for name in CONTENTS if name in contents)
        if contents != asked:
            print_line(
                f"Loading {loaded} from {checkpoint.name}, which this run saved; to load only "
                f"trainer.checkpoint.load_contents=[{','.join(asked)}], set trainer.resume_from_path to it",
                sys.__stdout__,
            )
        elif not set(CONTENTS) <= set(asked):
            print_line(
                f"Loading only {loaded} from {checkpoint.name} (trainer.checkpoint.load_contents)", sys.__stdout__
            )
        return contents

    return on_rank_zero(choose)


def verify_on_all_ranks(checkpoint: Path) -> dict[str, str]:
    """Damage to the files that a resume loads, by relative path; each rank reads some files; collective."""
    import torch.distributed as dist

    from verl_ext.distributed import gather_results

    def manifest_files() -> dict[str, FileEntry]:
        with _reading(checkpoint):
            return Manifest.read(checkpoint).files

    def damage(name: str) -> dict[str, str]:
        with _reading(checkpoint):
            return damaged_files(checkpoint, [name], raise_unreadable=True)

    def own_damaged_files() -> dict[str, str]:
        try:
            files = retry_reads(manifest_files)
            names = [name for name in files if not name.startswith(DERIVED)]
            names.sort(key=lambda name: -files[name]["bytes"])
            found: dict[str, str] = {}
            for name in names[dist.get_rank() :: dist.get_world_size()]:
                found |= retry_reads(partial(damage, name))
            return found
        except ValueError:  # the checkpoint was removed after it was chosen
            return {MANIFEST: "is missing or damaged"}

    found = gather_results(own_damaged_files)
    return {name: problem for problems in found for name, problem in problems.items()}


def _catch_up_tracker(checkpoint: Path, run_dir: Path) -> None:
    """Update a tracker that is behind the checkpoint; after the run's last checkpoint, no later save would do so."""
    tracked, step = read_tracker(run_dir)[0], step_of(checkpoint) or 0
    if is_of_run(checkpoint, run_dir) and (tracked is None or (step_of(tracked) or 0) < step):
        write_tracker(run_dir, step)


def is_of_run(checkpoint: Path, run_dir: Path) -> bool:
    """Whether a checkpoint is in a run directory; one of the paths may be relative, or have links."""
    return checkpoint.parent.resolve() == run_dir.resolve()


# The choice of the checkpoint


def find_checkpoint(
    run_dir: Path,
    resume_mode: str,
    resume_from_path: str | None,
    warn: Warn,
    *,
    with_optimizer: bool = True,
    damaged: Mapping[Path, str] = MappingProxyType({}),
) -> Path | None:
    """Find the checkpoint to resume from.

    Args:
        resume_mode: auto, disable or resume_path, as in verl.
        resume_from_path: a `global_step_N` directory to start from; in mode auto, a newer checkpoint of the run itself
            takes precedence.
        warn: called with a message if the newest checkpoint cannot be resumed or the tracker is wrong.
        damaged: checkpoints that are known to be damaged, with the reason.

    Returns:
        A complete checkpoint, or None to start at step 0.

    Raises:
        TransientError: a checkpoint that may be intact cannot be read.
        UserError: `resume_from_path` is not a complete checkpoint, or no checkpoint of the run is complete.
    """
    if resume_mode == "disable":
        return None

    def why_not(path: Path) -> str | None:
        if path in damaged:
            return damaged[path]
        try:
            with _reading(path):
                manifest = read_complete(path)
        except ValueError as error:
            return str(error)
        return _why_no_optimizer(path, manifest) if with_optimizer else None

    if resume_from_path is not None:
        path = Path(resume_from_path)
        if problem := why_not(path):
            raise UserError(f"trainer.resume_from_path {path} cannot be resumed: {problem}; specify another checkpoint")
        own = _newest_complete(run_dir, warn, why_not) if resume_mode == "auto" else None
        # a restart must not lose the steps since the run started from that path
        return own if own is not None and (step_of(own) or 0) > (step_of(path) or 0) else path
    return _newest_complete(run_dir, warn, why_not)


def _why_no_optimizer(path: Path, manifest: Manifest) -> str | None:
    """Why a complete checkpoint lacks the optimizer; None if it has one."""
    if DROPPED_OPTIMIZER not in manifest.dropped:
        return None
    if is_verl_checkpoint(path):
        return (
            "verl saved it without optimizer state; remove optimizer from trainer.checkpoint.load_contents to start a "
            "new optimizer"
        )
    return "its optimizer shards were dropped when it was kept as best (trainer.checkpoint.drop_optimizer_of_best)"


def _newest_complete(run_dir: Path, warn: Warn, why_not: Callable[[Path], str | None]) -> Path | None:
    """The first checkpoint that can be resumed, in order of preference; see `find_checkpoint`."""
    with _reading(run_dir):
        candidates = list_checkpoints(run_dir)
        if not candidates:
            return None
        preferred = _by_preference(run_dir, candidates, warn)
    problems = []
    for path in preferred:
        problem = why_not(path)
        if problem is None:
            return path
        problems.append(f"{path.name}: {problem}")
        warn(f"{path.name} cannot be resumed: {problem}; trying an older one")
    raise UserError(
        f"{run_dir} has checkpoints but none is complete ({'; '.join(problems)}); restore one, move the "
        "directory away, or start at step 0 with trainer.resume_mode=disable"
    )


def _by_preference(run_dir: Path, candidates: list[Path], warn: Warn) -> list[Path]:
    """The candidates in the order of `newest_first`; warns about a wrong tracker."""
    tracked, tracker_problem = read_tracker(run_dir, raise_unreadable=True)
    ordered = newest_first(run_dir, candidates)
    if tracker_problem:
        warn(f"the tracker file {tracker_problem}; looking for the newest complete checkpoint instead")
    elif tracked is not None and ordered[0] != tracked and why_incomplete(ordered[0]) is None:
        warn(f"the tracker names {tracked.name}, but {ordered[0].name} was completed later; resuming from that")
    return ordered


# The contents


def contents_to_load(checkpoint: Path, config: ResumeConfig, optimizer: str) -> list[str]:
    """Choose what to load from a checkpoint.

    `load_contents` applies to the checkpoint that a run starts from. A requeued run has the same setting, but must not
    drop the optimizer state that it has saved since. Therefore a checkpoint that the run itself saved with this
    optimizer is loaded in full, unless `resume_from_path` names it.

    Raises:
        ValueError: the manifest cannot be read.
    """
    asked: list[str] = [*config.checkpoint.load_contents]
    manifest = Manifest.read(checkpoint)
    is_named = config.resume_from_path is not None and checkpoint == Path(config.resume_from_path)
    if is_named or manifest.optimizer != optimizer or DROPPED_OPTIMIZER in manifest.dropped:
        return asked
    saved = {name.partition("_world_size_")[0] for name in manifest.files}
    return [*asked, *(name for name, kind in zip(CONTENTS, KINDS) if kind in saved and name not in asked)]


def require_same_optimizer(checkpoint: Path, optimizer: str) -> None:
    """Refuse to load the state of another optimizer.

    verl's checkpoints do not name their optimizer; `load_optimizer` compares the hyperparameters instead.

    Raises:
        UserError: another optimizer saved the checkpoint.
    """
    saved = Manifest.read(checkpoint).optimizer
    if saved and saved != optimizer:
        raise another_optimizer(checkpoint, f"of {saved}, but this run uses {optimizer}")


def another_optimizer(checkpoint: Path, how: str) -> UserError:
    """The error for a state of another optimizer; `how` completes "holds the optimizer state"."""
    return UserError(
        f"{checkpoint} holds the optimizer state {how}; restore the optim section of the configuration, or set "
        "trainer.checkpoint.load_contents=[model] to load only the weights and start a new optimizer and schedule"
    )
