"""The commands `ls` and `verify`, and functions that find the checkpoints of a run for all commands.

Does not import torch, so that these commands start quickly.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.manifest import (
    Manifest,
    UnreadableError,
    complete_checkpoints,
    damaged_files,
    is_verl_checkpoint,
    list_checkpoints,
    read_complete,
    step_of,
    why_incomplete,
)
from verl_ext.checkpoint.resume import find_checkpoint
from verl_ext.checkpoint.retention import RotationPlan, find_leftovers, finite_metric, plan_rotation
from verl_ext.config.schema import Key, Setting, check_value, keys
from verl_ext.console import print_line, print_summary, progress_bar, text_table
from verl_ext.errors import TransientError, UserError
from verl_ext.files import TEMPORARY, format_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

RETENTION = ("keep_best", "best_metric", "best_mode", "drop_optimizer_of_best")
"""Keys of `CheckpointConfig` that decide what rotation keeps."""


# Run directories


def require_run_dir(path: Path) -> Path:
    """Return `path` if it holds checkpoints or leftovers of interrupted saves; refuse it otherwise."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; specify a run directory")
    if step_of(path.resolve()) is not None:
        raise UserError(f"{path} is a checkpoint; specify its run directory, {path.resolve().parent}")
    if not list_checkpoints(path) and not find_leftovers(path):
        raise UserError(f"{path} contains no checkpoints; specify a directory with global_step_N subdirectories")
    return path


def require_steps(run_dir: Path, steps: list[int]) -> list[Path]:
    """The checkpoint directories of these steps without duplicates, complete or not; refuse unknown steps."""
    known = {step_of(path): path for path in list_checkpoints(run_dir)}
    missing = [str(step) for step in steps if step not in known]
    if missing:
        available = ", ".join(map(str, known)) or "none"
        raise UserError(f"{run_dir} has no checkpoint of step {', '.join(missing)}; available steps: {available}")
    return [known[step] for step in dict.fromkeys(steps)]


def newest_resumable(run_dir: Path) -> Path | None:
    """The checkpoint that the next start would resume from; None if there is none.

    Raises:
        TransientError: a checkpoint that may be intact cannot be read.
    """
    try:
        return find_checkpoint(run_dir, "auto", None, warn=lambda message: None)
    except TransientError:
        raise
    except UserError:  # there are checkpoints, but none is complete
        return None


def current_step(run_dir: Path) -> int:
    """The step of the checkpoint that the run would resume from, see `newest_resumable`; 0 if there is none."""
    newest = newest_resumable(run_dir)
    return 0 if newest is None else step_of(newest) or 0


def read_retention(run_dir: Path) -> tuple[int | None, CheckpointConfig]:
    """The rotation settings in a run's `config.yaml`; without the file, everything is kept.

    Returns:
        `trainer.max_ckpt_to_keep`, and `trainer.checkpoint`, of which only the keys in `RETENTION` are read.

    Raises:
        UserError: the file cannot be read, or one of these keys has an invalid value.
    """
    path = run_dir / "config.yaml"
    keep_all = CheckpointConfig(keep_best=0)
    if not path.is_file():
        return None, keep_all
    from verl_ext.config.run_config import read_config_file  # here, so that --help does not import OmegaConf

    trainer = _section(path, read_config_file(path), "trainer")
    checkpoint = _section(path, trainer, "checkpoint")
    max_to_keep = trainer.get("max_ckpt_to_keep")
    given = {name: checkpoint[name] for name in RETENTION if name in checkpoint}
    try:
        check_value(Key("trainer.max_ckpt_to_keep", int | None, None, Setting("", ge=1, null="all")), max_to_keep)
        for name, value in given.items():
            check_value(replace(keys(CheckpointConfig)[name], name=f"trainer.checkpoint.{name}"), value)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return max_to_keep, replace(keep_all, **given)


def _section(path: Path, values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name) or {}
    if not isinstance(found, dict):
        raise UserError(
            f"{path} cannot be used ({name} is {found!r}); correct it, or move it away to keep all checkpoints"
        )
    return found


def size_on_disk(path: Path) -> int:
    """Size in bytes of a file, or of a directory tree; files that vanish or cannot be read do not count."""
    total = os.path.getsize(path) if os.path.isfile(path) else 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # such as removed by rotation of a running training
                continue
    return total


# ls


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint or a leftover of one; if it is incomplete, `manifest` is None and `problem` gives the reason."""

    path: Path
    step: int
    num_bytes: int
    problem: str | None
    manifest: Manifest | None
    kept_because: list[str]
    will_be_removed: bool
    will_lose_optimizer: bool = False
    by_verl: bool = False
    is_unreadable: bool = False

    @property
    def state(self) -> str:
        """Whether the checkpoint is complete, or why not."""
        return self.short_state if self.problem is None else f"{self.short_state}: {self.problem}"

    @property
    def short_state(self) -> str:
        """Text for the column "state", without the reason why a checkpoint is incomplete."""
        writer = ", written by verl itself" if self.by_verl else ""
        if self.manifest is None:
            return "cannot be read now" if self.is_unreadable else f"incomplete{writer}"
        missing = [f", without {part}" for part in self.manifest.dropped]
        export = ", export damaged" if self.manifest.has_damaged_export else ", export deferred"
        return "".join([f"complete{writer}", *missing, export if self.manifest.deferred else ""])

    @property
    def retention(self) -> str:
        """Text for the column "kept because": what rotation does with the checkpoint, and why."""
        stripped = ["rotation would drop its optimizer"] if self.will_lose_optimizer else []
        if self.will_be_removed and self.manifest is None:
            return "the next start, save or prune removes it"
        return "rotation would remove it" if self.will_be_removed else "; ".join(self.kept_because + stripped)


def ls(arguments: argparse.Namespace) -> int:
    """Print the checkpoints as a table or as a JSON list."""
    run_dir = require_run_dir(arguments.run_dir)
    max_to_keep, config = read_retention(run_dir)
    checkpoints = list_all(run_dir, max_to_keep, config)
    if arguments.json:
        print_line(json.dumps([_as_json(each) for each in checkpoints], indent=1))
    else:
        print_line(_as_table(checkpoints, dict.fromkeys((config.best_metric, "train/loss"))))
    return 0


def list_all(run_dir: Path, max_to_keep: int | None, config: CheckpointConfig) -> list[CheckpointInfo]:
    """Checkpoints and leftovers of a run, highest step first."""
    try:
        step = current_step(run_dir)
    except TransientError:  # the column "state" shows it
        step = max((step_of(path) or 0 for path in list_checkpoints(run_dir)), default=0)
    plan = plan_rotation(run_dir, max_to_keep, config, step)
    checkpoints = [_checkpoint(path, plan) for path in list_checkpoints(run_dir)]
    found = [each for each in checkpoints if each is not None] + [_leftover(path) for path in find_leftovers(run_dir)]
    return sorted(found, key=lambda each: -each.step)


def _checkpoint(path: Path, plan: RotationPlan) -> CheckpointInfo | None:
    """Describe a checkpoint; None if rotation has removed it meanwhile."""
    step, num_bytes, by_verl = step_of(path) or 0, size_on_disk(path), is_verl_checkpoint(path)
    try:
        manifest = read_complete(path)
    except ValueError as error:
        if not path.exists():
            return None
        why = ["not complete, so rotation leaves it alone"]
        return CheckpointInfo(
            path, step, num_bytes, str(error), None, why, will_be_removed=False, by_verl=by_verl,
            is_unreadable=isinstance(error, UnreadableError),
        )  # fmt: skip
    reasons, will_be_removed = plan.reasons.get(path, []), path in plan.remove
    return CheckpointInfo(path, step, num_bytes, None, manifest, reasons, will_be_removed, path in plan.strip, by_verl)


def _leftover(path: Path) -> CheckpointInfo:
    what = "save" if path.suffix == TEMPORARY else "removal"
    problem = f"a {what} that is in progress or was interrupted"
    step = step_of(Path(path.name.partition(".")[0])) or 0
    return CheckpointInfo(path, step, size_on_disk(path), problem, None, [], will_be_removed=True)


def _as_json(info: CheckpointInfo) -> dict[str, Any]:
    manifest = info.manifest
    return {
        "path": str(info.path),
        "step": info.step,
        "bytes": info.num_bytes,
        "world_size": manifest and manifest.world_size,
        "time": manifest and manifest.time,
        "complete": manifest is not None,
        "state": info.state,
        "written_by_verl": info.by_verl,
        "metrics": manifest.metrics if manifest else {},
        "dropped": manifest.dropped if manifest else [],
        "deferred": manifest.deferred if manifest else [],
        "kept_because": info.kept_because,
        "will_be_removed": info.will_be_removed,
        "will_lose_optimizer": info.will_lose_optimizer,
    }


def _as_table(checkpoints: list[CheckpointInfo], metrics: dict[str, None]) -> str:
    columns = {name: [_metric(each, name) for each in checkpoints] for name in metrics}
    shown = {name: column for name, column in columns.items() if any(cell != "-" for cell in column)}
    header = ["step", "size", "ranks", "saved at", "state", *shown, "kept because"]
    rows = [
        [
            str(each.step),
            format_bytes(each.num_bytes),
            str(each.manifest.world_size) if each.manifest else "-",
            _local_time(each.manifest),
            each.short_state,
            *(column[number] for column in shown.values()),
            each.retention,
        ]
        for number, each in enumerate(checkpoints)
    ]
    problems = [f"{each.path.name}: {each.problem}" for each in checkpoints if each.problem is not None]
    return "\n".join([text_table([header, *rows]), *problems])


def _metric(info: CheckpointInfo, name: str) -> str:
    value = finite_metric(info.manifest, name) if info.manifest else None
    return "-" if value is None else f"{value:.4g}"


def _local_time(manifest: Manifest | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time)) if manifest and manifest.time else "-"


# verify


def verify(arguments: argparse.Namespace) -> int:
    """Verify the checkpoints and print a line for each. Return 1 if any is damaged or incomplete."""
    run_dir = require_run_dir(arguments.run_dir)
    checkpoints = require_steps(run_dir, arguments.step) if arguments.step else list_checkpoints(run_dir)
    if not checkpoints:
        raise UserError(f"{run_dir} holds only leftovers of saves and removals; there is nothing to verify")
    complete = complete_checkpoints(run_dir)
    num_bytes = sum(complete[path].num_bytes for path in checkpoints if path in complete)
    num_read, num_undamaged = len(checkpoints), 0
    with progress_bar(total=num_bytes, desc="reading", unit="B") as bar:
        for path in checkpoints:
            manifest, problems = _examine(path, bar.update)
            if problems and not path.exists():  # removed by rotation of a running training
                _print_above(bar, f"{path.name}: removed while it was being read")
                num_read -= 1
                continue
            num_undamaged += not problems
            lines = [f"{path.name}: {_verdict(path, manifest, problems)}", *(f"  {line}" for line in problems)]
            _print_above(bar, "\n".join(lines))
    print_summary(f"Verified: {num_undamaged} of {num_read} checkpoints are undamaged")
    return 0 if num_undamaged == num_read else 1


def _examine(checkpoint: Path, progress: Callable[[int], None]) -> tuple[Manifest | None, list[str]]:
    """The manifest of a checkpoint, and its problems, one line for each damaged file."""
    try:
        manifest = Manifest.read(checkpoint)
        damaged = damaged_files(checkpoint, progress=progress)
    except ValueError as error:
        return None, [str(error)]
    problem = why_incomplete(checkpoint)  # digests do not detect a manifest of another step
    return manifest, [f"{name} {what}" for name, what in damaged.items()] or ([problem] if problem else [])


def _print_above(bar: tqdm[Any], text: str) -> None:
    with bar.external_write_mode():
        print_line(text)


def _verdict(checkpoint: Path, manifest: Manifest | None, problems: list[str]) -> str:
    if problems or manifest is None:
        return "damaged or incomplete"
    by_verl = is_verl_checkpoint(checkpoint)
    basis = "verl keeps no digests, but every checksum is correct" if by_verl else "every digest is correct"
    return f"complete, {len(manifest.files)} files, {format_bytes(manifest.num_bytes)}, {basis}"
