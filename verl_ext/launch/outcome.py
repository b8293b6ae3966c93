"""How the ranks of this node ended, from torchrun's failure records and from what the launcher was asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any, Protocol

from verl_ext.errors import STOP_SIGNALS, STOPPED_EXIT_CODE, UNHEALTHY_EXIT_CODE, USER_ERROR_EXIT_CODE

# A rank that was asked has saved (75), so has one that a health rule stopped (3), or it was so new that it had no
# handler yet (-N).
EXIT_CODES_OF_A_STOP = {STOPPED_EXIT_CODE, UNHEALTHY_EXIT_CODE, *(-number for number in STOP_SIGNALS)}


class RankFailure(Protocol):
    """What is read of torch's `ProcessFailure`."""

    exitcode: int
    timestamp: int
    pid: int

    @property
    def message(self) -> str | dict[str, Any]:
        """What the rank has left, or torchrun's own words."""

    def signal_name(self) -> str:
        """Name of the signal that killed the process."""


@dataclass(frozen=True)
class Request:
    """What the launcher was asked while its ranks ran, and what it did.

    Attributes:
        signal: the first signal.
        immediate: the one that asked to stop without saving, see `StopSignals`.
        killed: whether ranks were killed.
        was_too_slow: whether that was because their time to save had run out.
    """

    signal: Signals
    immediate: Signals | None = None
    killed: bool = False
    was_too_slow: bool = False


@dataclass(frozen=True)
class Failure:
    """Why the ranks ended.

    Attributes:
        message: a sentence for people.
        exit_code: of the rank that failed first; negative for a signal.
    """

    message: str
    exit_code: int

    @property
    def is_user_error(self) -> bool:
        """Whether a rank refused its input, rather than crashed."""
        return self.exit_code == USER_ERROR_EXIT_CODE


@dataclass(frozen=True)
class Stopped:
    """The ranks ended because somebody asked, by way of the launcher or of a rank.

    Attributes:
        request: what the launcher was asked; None when only ranks were.
        exit_code: for the command.
    """

    request: Request | None
    exit_code: int

    @classmethod
    def by(cls, request: Request | None, exit_codes: Collection[int] = ()) -> Stopped:
        """The exit code is 128 + N when a signal N stopped the ranks without saving, 3 after a health rule, else 75."""
        if request is not None and request.immediate is not None:
            return cls(request, 128 + request.immediate)
        if UNHEALTHY_EXIT_CODE in exit_codes:
            return cls(None, UNHEALTHY_EXIT_CODE)
        return cls(request, STOPPED_EXIT_CODE)


Outcome = Failure | Stopped | None  # None: every rank did all steps


def judge(failures: Mapping[int, RankFailure], request: Request | None) -> Outcome:
    """Tell a stop from a crash.

    Args:
        failures: rank to failure, of those that ended before torchrun ended the others; empty when all exited with 0.
        request: what the launcher was asked meanwhile.
    """
    if not failures:
        return None
    expected = set(EXIT_CODES_OF_A_STOP)
    if request is not None and request.killed:
        expected.add(-Signals.SIGKILL)
    if request is not None and request.immediate is not None:
        expected.add(-request.immediate)  # whoever sent it to the launcher may have sent it to the ranks
    crashes = {rank: failure for rank, failure in failures.items() if failure.exitcode not in expected}
    if crashes:
        return describe(crashes)
    return Stopped.by(request, [failure.exitcode for failure in failures.values()])


def describe(failures: Mapping[int, RankFailure]) -> Failure:
    """Name the rank that is the cause: one that refused its input, else one that was killed, else the first to fail.

    torchrun looks at its ranks ten times a second and notes whole seconds. A rank that fails because its peer was
    killed can therefore have the same time as that peer. torchrun's own SIGKILL comes later and is not among failures.
    """
    refused = {rank: failure for rank, failure in failures.items() if failure.exitcode == USER_ERROR_EXIT_CODE}
    *_, rank = min(
        (failure.exitcode != -Signals.SIGKILL, failure.timestamp, rank)
        for rank, failure in (refused or failures).items()
    )
    first = failures[rank]
    if refused and isinstance(first.message, str):
        return Failure(first.message, first.exitcode)
    how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"failed with exit code {first.exitcode}"
    return Failure(f"rank {rank} (process {first.pid}) {how}", first.exitcode)
