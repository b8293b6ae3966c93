"""Process management: stop signals, ending with the parent, liveness checks, and a quiet start.

Imports only the standard library and modules that do the same.
"""

from __future__ import annotations

import ctypes
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from verl_ext.commands import SET_UP_SEPARATELY, missing_package
from verl_ext.errors import SAME_REQUEST_S, STOP_SIGNALS, STOPPED_EXIT_CODE
from verl_ext.paths import CHECKOUT

# Stop signals


class StopRequest(BaseException):
    """The process was asked to stop; like KeyboardInterrupt, no `except Exception` catches it.

    Attributes:
        signal: the signal that requested the stop.
        handled: set by code that catches the request and stops, so that the request is not raised again.
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        self.handled = False
        super().__init__(self.signal.name)

    @property
    def exit_code(self) -> int:
        """75, which schedulers requeue; 131 for SIGQUIT, the same as for ranks that SIGQUIT ends."""
        return 128 + self.signal if self.signal is signal.SIGQUIT else STOPPED_EXIT_CODE


class StopSignals:
    """Stop signals that this process received, in order.

    Schedulers and wrapper scripts signal a process and then its process group, or signal twice. Repeats of
    `STOP_SIGNALS` are therefore the same request. Only SIGQUIT and a second Ctrl-C ask to stop immediately.

    Args:
        listened: the signals to handle.
        kill_after_s: a request to stop immediately kills this process, and so does any signal this long after the first
            one; None if the caller handles `immediate` itself.

    Attributes:
        received: all signals so far.
        asked_at: `time.monotonic` of the first signal; infinity without one.
        immediate: the signal that requested an immediate stop, if any: a SIGQUIT, or a SIGINT more than
            `SAME_REQUEST_S` after another SIGINT.
    """

    def __init__(
        self, listened: Sequence[signal.Signals] = (*STOP_SIGNALS, signal.SIGQUIT), kill_after_s: float | None = None
    ) -> None:
        self.received: list[signal.Signals] = []
        self.immediate: signal.Signals | None = None
        self._listened, self._kill_after_s = listened, kill_after_s
        self.asked_at = self._interrupted_at = math.inf  # the latter is of the first SIGINT
        self._raises = False
        self._request: StopRequest | None = None  # the last one that was raised
        self._previous: dict[signal.Signals, Any] = {}

    def install(self) -> None:
        """Install the handlers; signals that the parent set to be ignored (nohup) stay ignored."""
        for number in self._listened:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore signals while Python exits, because Python restores default actions and a repeat would kill it."""
        for number in self._listened:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Context for work that can be interrupted anywhere, also by a signal that was received before.

        Raises:
            StopRequest: at the first signal; later signals are only recorded.
        """
        self._raises = True
        try:
            self._raise_if_asked()  # after the line above, so that no signal falls between the two
            yield
        except Exception:
            self._raise_if_asked()  # an import or a library may have replaced the request by this error
            raise
        finally:
            self._raises = False
        self._raise_if_asked()  # a handler cannot raise inside a destructor

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now, asked = time.monotonic(), signal.Signals(number)
        self.received.append(asked)
        self.asked_at = min(self.asked_at, now)
        if asked is signal.SIGINT:
            self._interrupted_at = min(self._interrupted_at, now)
            is_immediate = now - self._interrupted_at > SAME_REQUEST_S
        else:
            is_immediate = asked is signal.SIGQUIT
        if is_immediate and self.immediate is None:
            self.immediate = asked
        if self._kill_after_s is not None and (is_immediate or now - self.asked_at > self._kill_after_s):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._raises:
            self._raise(asked)

    def _raise_if_asked(self) -> None:
        if self.received and not (self._request is not None and self._request.handled):
            self._raise(self.received[0])

    def _raise(self, asked: signal.Signals) -> NoReturn:
        self._raises, self._request = False, StopRequest(asked)
        raise self._request


# Parents and other processes

LAUNCHER_PID = "VERL_EXT_LAUNCHER_PID"
"""Environment variable of the ranks with the process id of their launcher."""
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_LIBC = ctypes.CDLL(None)  # loaded here, because between fork and exec another thread may hold the loader's lock


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when the thread that forked it ends; callable between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, number)


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, which distinguishes it from a later process with the same id.

    Returns:
        Field 22 of proc_pid_stat(5); None if the process does not exist or is a zombie.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()  # after the name, which may contain anything
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def is_alive(pid: int, started: int | None = None) -> bool:
    """Whether a process of any user runs, even if /proc is mounted with hidepid.

    Args:
        pid: process id.
        started: `start_ticks` of the process; None accepts any process with this id.
    """
    if (ticks := start_ticks(pid)) is not None:
        return started is None or ticks == started
    if Path(f"/proc/{pid}").exists():  # a zombie
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def has_ended(pid: int) -> bool:
    """Whether a child process has ended; it stays a zombie, so that its number is not reused."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def pid_namespace() -> int:
    """Identifier of the PID namespace; containers can share a host name and use the same process ids.

    Outside containers, it is the same on all machines.
    """
    return os.stat("/proc/self/ns/pid").st_ino


def boot_id() -> str:
    """Identifier of the machine since its last boot; copies of a virtual machine can share a host name.

    Empty if a sandbox hides it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_HARMLESS = ("PATH", "HOME", "TMPDIR", "LANG", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD")
"""Variables that a Python process may need."""


def bare_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of an environment that a Python process needs."""
    return {
        name: value
        for name, value in environment.items()
        if name in _HARMLESS or name.startswith(("LC_", "PYTHON", "OMP_"))
    }


# A quiet start

OURS = ("verl_ext", "eval_pipeline", "benchmarks", "tests")


def suppress_startup_tracebacks() -> None:
    """Suppress tracebacks of Ctrl-C and of failed imports while `python -m` starts a command.

    Imports take time, with torch several seconds, and a Ctrl-C during imports simply ends the process. Ranks of
    torchrun keep their tracebacks, because no user types their command.
    """
    is_typed = sys.argv[:1] == ["-m"]  # set by Python while it looks for the module to run
    if not is_typed or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    open_closed_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = _report_failed_import


def open_closed_streams() -> None:
    """Open /dev/null as standard input and error if they are closed, for this process and its children.

    Otherwise, the next opened file would become their input or receive their messages.
    """
    for number, name, mode in ((0, "stdin", "r"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode))


def _report_failed_import(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    package = "" if name is None else name.partition(".")[0]
    has_no_address_space = isinstance(error, ImportError) and "failed to map segment" in str(error)
    if not has_no_address_space and (name is None or package in OURS):
        sys.__excepthook__(kind, error, traceback)
        return
    if has_no_address_space:
        message = f"not enough address space for the packages ({error}); raise `ulimit -v`, or set it to unlimited"
    elif package in SET_UP_SEPARATELY:
        message = missing_package(package)
    elif CHECKOUT is None:
        message = f"{sys.executable} has no package {name}; install verl-ext again, with its dependencies"
    else:
        message = (
            f"{sys.executable} has no package {name}; use .venv/bin/python, which `bash run_sft.sh` creates, or a "
            "Python with the packages in requirements/"
        )
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Delay stop signals until torch is imported, because its C code would print exceptions that handlers raise."""
    held: list[int] = []
    previous = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGQUIT)}
    for number, handler in previous.items():  # with a signal mask, another thread could receive the signal
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for received in held:
            signal.raise_signal(received)


@contextmanager
def defer_gc() -> Iterator[None]:
    """Disable the garbage collector during imports at the start of a process.

    Modules create hundreds of thousands of objects that live as long as the process. The collector would traverse them
    repeatedly, which took a fifth of a rank's import time. Afterwards, the collector ignores these objects.
    """
    if not gc.isenabled():  # the caller has decided otherwise
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Drop output to file descriptor 1, where gloo prints a message for every peer of every group."""
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
