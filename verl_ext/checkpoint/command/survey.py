"""Everything in a run's directory that is a checkpoint or looks like one, and what rotation thinks of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from verl_ext.checkpoint.command.run_directory import newest_resumable
from verl_ext.checkpoint.layout import Manifest, list_steps, read_complete, step_of
from verl_ext.checkpoint.retention import Retention
from verl_ext.checkpoint.rotation import Plan, find_leftovers, plan_rotation
from verl_ext.checkpoint.stock import is_stock
from verl_ext.files import TEMPORARY


@dataclass(frozen=True)
class Entry:
    """One directory.

    Attributes:
        path: the directory.
        step: optimizer steps done.
        num_bytes: size of its files on the disk.
        problem: why it is not complete, None when it is.
        manifest: what a complete one says of itself.
        kept_because: why rotation leaves it.
        goes_next: whether rotation would remove it.
        loses_optimizer: whether rotation would drop its optimizer shards.
        is_stock: whether verl itself wrote it.
    """

    path: Path
    step: int
    num_bytes: int
    problem: str | None
    manifest: Manifest | None
    kept_because: list[str]
    goes_next: bool
    loses_optimizer: bool = False
    is_stock: bool = False

    @property
    def state(self) -> str:
        """Complete, or why not, in words."""
        writer = ", written by verl itself" if self.is_stock else ""
        if self.problem is not None or self.manifest is None:
            return f"incomplete{writer}: {self.problem}"
        return "".join([f"complete{writer}", *(f", without {part}" for part in self.manifest.dropped)])

    @property
    def fate(self) -> str:
        """What rotation does with it and why, in words."""
        stripped = ["rotation would drop its optimizer"] if self.loses_optimizer else []
        if self.goes_next and self.manifest is None:
            return "the next start, save or prune removes it"
        return "rotation would remove it" if self.goes_next else "; ".join(self.kept_because + stripped)


def survey(run_dir: Path, retention: Retention) -> list[Entry]:
    """All entries of a run, the highest step first."""
    plan = plan_rotation(run_dir, retention, current_step(run_dir))
    found = [_checkpoint(path, plan) for path in list_steps(run_dir)]
    checkpoints = [entry for entry in found if entry is not None]
    leftovers = [_leftover(path) for path in find_leftovers(run_dir)]
    return sorted(checkpoints + leftovers, key=lambda entry: -entry.step)


def current_step(run_dir: Path) -> int:
    """The step that the run is at, as far as its checkpoints tell; 0 where none can be resumed."""
    newest = newest_resumable(run_dir)
    return 0 if newest is None else step_of(newest) or 0


def size_on_disk(directory: Path) -> int:
    """Bytes of a file, or of all files below a directory; those that vanish meanwhile do not count."""
    total = directory.lstat().st_size if directory.is_file() else 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_size
            except FileNotFoundError:  # a training that goes on removes what it no longer keeps
                continue
    return total


def _checkpoint(path: Path, plan: Plan) -> Entry | None:
    """One checkpoint; None for one that a training has removed meanwhile."""
    step, num_bytes, stock = step_of(path) or 0, size_on_disk(path), is_stock(path)
    try:
        manifest = read_complete(path)
    except ValueError as error:
        if not path.exists():
            return None
        why = ["not complete, so rotation leaves it alone"]
        return Entry(path, step, num_bytes, str(error), None, why, goes_next=False, is_stock=stock)
    reasons, goes_next = plan.reasons.get(path, []), path in plan.remove
    return Entry(path, step, num_bytes, None, manifest, reasons, goes_next, path in plan.strip, stock)


def _leftover(path: Path) -> Entry:
    what = "save" if path.suffix == TEMPORARY else "removal"
    problem = f"a {what} that is going on or was cut short"
    return Entry(path, step_of(Path(path.name.partition(".")[0])) or 0, size_on_disk(path), problem, None, [], True)
