"""What the checkpoints on the disk show of a run."""

from __future__ import annotations

from verl_ext.checkpoint.manifest import (
    EXPORT,
    complete_checkpoints,
    has_export,
    list_checkpoints,
    read_tracker,
    step_of,
    why_incomplete,
)
from verl_ext.commands import program
from verl_ext.files import GIB
from verl_ext.health.findings import Seen, alarm, notice, ok, warning
from verl_ext.health.run_files import RunFiles

SIZE_MARGIN = 0.2
"""Share by which the sizes of a run's checkpoints may differ."""


def exports(files: RunFiles) -> Seen | None:
    """Whether every checkpoint is complete, and how many have an export; None without any."""
    paths = list_checkpoints(files.directory)
    if not paths:
        return None
    problems = {path: reason for path in paths if (reason := why_incomplete(path)) is not None}
    wrong = [f"{path.name}: {reason}" for path, reason in problems.items() if path.exists()]  # else rotation removed it
    exported = [path for path in paths if has_export(path)]
    if wrong:
        return alarm("; ".join(wrong) + f"; remove what is not complete, or run {program('checkpoint')} verify")
    return ok(f"{len(paths)} complete, {len(exported)} of them with {EXPORT}/")


def sizes(files: RunFiles) -> Seen | None:
    """Whether the complete checkpoints are of one size; None without any."""
    found = [manifest.num_bytes for manifest in complete_checkpoints(files.directory).values()]
    if not found:
        return None
    told = f"{min(found) / GIB:.2f} to {max(found) / GIB:.2f} GiB"
    alike = max(found) <= (1 + SIZE_MARGIN) * min(found)
    return ok(told) if alike else notice(f"{told}; exports may be rarer than saves, or an optimizer was dropped")


def tracker(files: RunFiles) -> Seen | None:
    """Whether `latest_checkpointed_iteration.txt` names the newest; None without a complete checkpoint."""
    steps = [manifest.step for manifest in complete_checkpoints(files.directory).values()]
    if not steps:
        return None
    tracked, wrong = read_tracker(files.directory)
    if tracked is None:
        return warning(f"it {wrong}; the next start takes the newest complete checkpoint")
    behind = step_of(tracked) != max(steps)
    told = f"it names {tracked.name}"
    return warning(f"{told}, but global_step_{max(steps)} is there") if behind else ok(told)


def expected(files: RunFiles) -> Seen | None:
    """Whether the checkpoint that was due last is there; None where none was due yet."""
    total, every = files.run["total_steps"], files.config["trainer"]["save_freq"]
    last = files.history.step
    if total is None or files.run["status"] == "waiting":
        return None
    due = total if last >= total else last - last % every if every > 0 else 0
    if files.run["status"] == "running" and every > 0:
        due = (due - 1) // every * every  # the one that is due now may be under way
    if due <= 0:
        return None
    there = [manifest.step for manifest in complete_checkpoints(files.directory).values()]
    if not any(step >= due for step in there):
        return alarm(
            f"global_step_{due} was due and is not there; the last complete one is {max(there, default='none')}"
        )
    return ok(f"{len(there)} kept, the newest is global_step_{max(there)}")
