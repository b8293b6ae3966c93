"""Starts the ranks again after a crash, with growing pauses, until restarts bring nothing new."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

from verl_ext.checkpoint.manifest import read_complete, read_tracker
from verl_ext.launch.outcome import Failure, Outcome
from verl_ext.processes import StopSignals
from verl_ext.trainer.stages import RunConfig

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


def run_with_restarts(
    attempt: Callable[[], Outcome],
    progress: Callable[[], object],
    announce: Callable[[Failure, str], None],
    *,
    restarts: int,
    signals: StopSignals,
    first_pause_s: float = FIRST_PAUSE_S,
) -> Outcome:
    """Call `attempt` until it ends with anything but a crash, or `restarts` restarts in a row brought no checkpoint.

    Args:
        attempt: runs the ranks once.
        progress: what the run has to show; None for nothing, another value after every new checkpoint.
        announce: told before each pause why the ranks ended, and `restart N of K in S s`.
        restarts: how often to start again without a new checkpoint.
        signals: what the launcher is asked; a stop is never restarted.
        first_pause_s: seconds before the first restart; each pause is twice the one before, to 300 s at most.

    Returns:
        The outcome of the last attempt.

    Raises:
        StopRequest: the launcher was asked to stop during a pause.
    """
    reached, used = progress(), 0
    while True:
        outcome = attempt()
        if not isinstance(outcome, Failure) or outcome.is_user_error or signals.received:
            return outcome
        if (now := progress()) not in (None, reached):
            reached, used = now, 0
        if used == restarts:
            return outcome
        used += 1
        pause = pause_before(used, first_pause_s)
        announce(outcome, f"restart {used} of {restarts} in {pause:g} s")
        with signals.raising():
            time.sleep(pause)


def pause_before(restart: int, first_pause_s: float) -> float:
    """Seconds to wait before a restart, counted from 1."""
    return min(first_pause_s * 2 ** (restart - 1), LONGEST_PAUSE_S)


def last_save(run_dir: Path) -> tuple[int, float] | None:
    """Step and time of the complete checkpoint that the tracker names; None where there is none."""
    tracked, _ = read_tracker(run_dir)
    if tracked is None:
        return None
    try:
        manifest = read_complete(tracked)
    except ValueError:
        return None
    return manifest.step, manifest.time


def going_on(config: RunConfig) -> RunConfig:
    """A copy that resumes what the run has saved, also where its first start was told to begin elsewhere."""
    copy = deepcopy(config)
    copy.trainer.resume_mode = "auto"
    return copy
