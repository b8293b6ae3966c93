"""Outcomes of an attempt (finished, stopped or crashed), and restarts after a crash."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, TypeVar

from verl_ext.errors import STOP_SIGNALS, STOPPED_EXIT_CODE, UNHEALTHY_EXIT_CODE, USER_ERROR_EXIT_CODE

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

T = TypeVar("T")
EXIT_CODES_OF_A_STOP = {STOPPED_EXIT_CODE, UNHEALTHY_EXIT_CODE, *(-number for number in STOP_SIGNALS)}
"""Exit codes of a rank that saved on request (75) or for a health rule (3), or had no signal handler yet (-N)."""
NO_REPLY = "<N/A>"
"""torch's name for the file of a rank that wrote none; its message then refers to torch's documentation."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0


@dataclass(frozen=True)
class HandledStop:
    """A stop request that the launcher received while its ranks ran, and how the launcher handled it.

    Attributes:
        signal: the first signal.
        immediate: the signal that requested a stop without saving; see `StopSignals`.
        killed: whether ranks were killed.
        was_too_slow: whether ranks were killed because they exceeded the time to save.
    """

    signal: Signals
    immediate: Signals | None = None
    killed: bool = False
    was_too_slow: bool = False


@dataclass(frozen=True)
class Failure:
    """A crash of a rank, or input that a rank rejected.

    Attributes:
        message: what happened, for the user.
        exit_code: exit code of the rank that failed first; negative for a signal.
    """

    message: str
    exit_code: int

    @property
    def is_user_error(self) -> bool:
        """Whether a rank rejected its input."""
        return self.exit_code == USER_ERROR_EXIT_CODE


@dataclass(frozen=True)
class Stopped:
    """A stop that was requested from the launcher or from a rank.

    Attributes:
        request: the launcher's request; None if only ranks or another node received a signal, or a health rule stopped
            the run.
        exit_code: exit code of the command.
        elsewhere: what happened on another node, if it was stopped before the ranks could agree on it.
    """

    request: HandledStop | None
    exit_code: int
    elsewhere: str = ""

    @classmethod
    def by(cls, request: HandledStop | None, exit_codes: Collection[int] = ()) -> Stopped:
        """The exit code is 128 + N if signal N stopped the ranks without saving, 3 after a health rule, else 75."""
        if request is not None and request.immediate is not None:
            return cls(request, 128 + request.immediate)
        if UNHEALTHY_EXIT_CODE in exit_codes:
            return cls(None, UNHEALTHY_EXIT_CODE)
        return cls(request, STOPPED_EXIT_CODE)


Outcome = Failure | Stopped | None  # None: every rank completed all steps


class NodeEndedError(Exception):
    """Another node has failed, was stopped or was started again, so the ranks here wait for peers that have ended.

    Attributes:
        outcome: what it means for this node.
    """

    def __init__(self, outcome: Failure | Stopped) -> None:
        super().__init__(outcome.message if isinstance(outcome, Failure) else outcome.elsewhere)
        self.outcome = outcome


def is_known_to_all(outcome: Outcome, exit_codes: Collection[int]) -> bool:
    """Whether the ranks of all nodes have ended in the same way, so that no launcher has to tell the others.

    Args:
        exit_codes: of the ranks that failed. Ranks that save on request exit with 75, after all ranks have agreed.
    """
    if isinstance(outcome, Stopped):
        return bool(exit_codes) and {*exit_codes} <= {STOPPED_EXIT_CODE, UNHEALTHY_EXIT_CODE}
    return outcome is None


def classify_outcome(failures: Mapping[int, ProcessFailure], request: HandledStop | None) -> Outcome:
    """Distinguish a stop from a crash.

    Args:
        failures: failures by rank, for ranks that ended before torchrun ended the others; empty if all exited with 0.
        request: the stop request that the launcher received, if any.
    """
    if not failures:
        return None
    expected = set(EXIT_CODES_OF_A_STOP)
    if request is not None and request.killed:
        expected.add(-Signals.SIGKILL)
    if request is not None and request.immediate is not None:
        expected.add(-request.immediate)  # the sender may have signaled the ranks, too
    crashes = {rank: failure for rank, failure in failures.items() if failure.exitcode not in expected}
    if crashes:
        return first_failure(crashes)
    return Stopped.by(request, [failure.exitcode for failure in failures.values()])


def first_failure(failures: Mapping[int, ProcessFailure]) -> Failure:
    """Find the cause: a rank that rejected its input, else one that was killed, else the first to fail.

    torchrun polls its ranks ten times a second and records whole seconds, so a rank that fails because its peer was
    killed can have the same timestamp. torchrun's own SIGKILL comes later and is not among the failures.
    """
    refused = {rank: failure for rank, failure in failures.items() if failure.exitcode == USER_ERROR_EXIT_CODE}
    *_, rank = min(
        (failure.exitcode != -Signals.SIGKILL, failure.timestamp, rank)
        for rank, failure in (refused or failures).items()
    )
    first = failures[rank]
    if refused and first.error_file == NO_REPLY:
        return Failure(f"rank {rank} rejected its input; see its message above", first.exitcode)
    if first.exitcode > 0 and first.error_file != NO_REPLY and isinstance(first.message, str):  # of a `UserError`
        return Failure(first.message, first.exitcode)
    how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"failed with exit code {first.exitcode}"
    return Failure(f"rank {rank} (process {first.pid}) {how}", first.exitcode)


def is_crash(outcome: Outcome) -> bool:
    """Whether another attempt may succeed."""
    return isinstance(outcome, Failure) and not outcome.is_user_error


def run_with_restarts(
    attempt: Callable[[], T],
    *,
    may_restart: Callable[[T], bool],
    progress: Callable[[], object],
    announce: Callable[[T, str], None],
    pause: Callable[[float], object],
    restarts: int,
) -> T:
    """Call `attempt` until it does not crash, or `restarts` restarts in a row made no progress; returns its result.

    Args:
        attempt: runs once and returns its outcome.
        may_restart: whether an outcome is a crash.
        progress: returns a value that changes with progress, such as the last checkpoint; None before any progress.
        announce: called before each pause with the outcome and `restart N of K in S s`.
        pause: waits for the given seconds, `FIRST_PAUSE_S` before the first restart; doubles each
            time, up to `LONGEST_PAUSE_S`.
        restarts: number of restarts that may fail in a row.
    """
    reached, used = progress(), 0
    while may_restart(outcome := attempt()):
        if (now := progress()) not in (None, reached):
            reached, used = now, 0
        if used == restarts:
            break
        used += 1
        seconds = min(FIRST_PAUSE_S * 2 ** (used - 1), LONGEST_PAUSE_S)
        announce(outcome, f"restart {used} of {restarts} in {seconds:g} s")
        pause(seconds)
    return outcome
