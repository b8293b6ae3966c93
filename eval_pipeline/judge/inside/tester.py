"""The process that runs tests. It holds what the answer must not see, and sees of the answer only plain values."""

from __future__ import annotations

import builtins
import io
import marshal
import random
import resource
import signal
import socket
import sys
import traceback
from typing import Any

import frames
from errors import ClassesOfAnswer, OfAnswer
from operations import OF_A_TEST
from peer import ConversationError, GoneError, Peer, describe
from values import Coroutine, ErrorClass, Handle, Reader

_TEST_FILE = "<test>"
_MESSAGE_CHARS = 500
_MB = 1 << 20
_EXTRA_MEMORY_MB = 256
_MOST_GROWTH_KB = 32 << 10
"""Of the memory of a process that goes on to the next test."""


def work(fds: list[int], options: dict[str, Any], policy_for: Any) -> None:
    """Run the tests that come over the descriptor, each with the answer's connection, until one leaves something."""
    control = socket.socket(fileno=fds[0])
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # see `binding.prepare`
    most_kb, num_modules = _memory_kb() + _MOST_GROWTH_KB, len(sys.modules)
    is_clean = True
    while is_clean and (received := frames.receive(control, most_fds=1)) is not None:
        job, blob, (connection,) = received
        _limit(job["limits"])
        random.seed(0)
        with socket.socket(fileno=connection) as answer:
            peer = TesterPeer(answer)
            outcome, message = _judge(job, blob, peer)
        _set_timers(0, 0)
        # what an answer made this process take or import must not decide on the next answer
        is_small = _memory_kb() < most_kb and len(sys.modules) == num_modules
        is_clean = job["leaves_nothing"] and is_small and (peer.lost is None or isinstance(peer.lost, GoneError))
        reply = {"outcome": outcome, "message": message[:_MESSAGE_CHARS], "is_clean": is_clean}
        frames.send(control, reply)


def _judge(job: dict[str, Any], compiled: bytes, peer: TesterPeer) -> tuple[str, str]:
    outcome, message = run_test(job, compiled, peer)
    if peer.lost is None:
        return outcome, message
    # whatever the test made of it: without its answer it has come to nothing
    return "lost" if isinstance(peer.lost, GoneError) else "error", str(peer.lost)


def _memory_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _limit(limits: dict[str, Any]) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    memory = (limits["memory_mb"] + _EXTRA_MEMORY_MB) * _MB
    # soft limits, so that the next test can have its own
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime + limits["cpu_s"]) + 1),
    ):
        highest = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (value if highest == resource.RLIM_INFINITY else min(value, highest), highest))
    _set_timers(limits["test_cpu_s"], limits["test_wall_s"])


def _set_timers(cpu_s: float, wall_s: float) -> None:
    # nothing handles the signals, so the kernel ends this process whatever it is busy with
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def run_test(job: dict[str, Any], compiled: bytes, peer: TesterPeer) -> tuple[str, str]:
    """Run a test.

    Args:
        job: preamble and test as text, and the entry point.
        compiled: both as marshalled code; empty where that could not be made.
        peer: this end of the conversation with the answer.

    Returns:
        "passed", "failed" (by an assertion of its own) or "error", and a message.
    """
    names = Names(peer)
    try:
        preamble, test = marshal.loads(compiled) if compiled else (None, None)
        exec(preamble or compile(job["preamble"], "<preamble>", "exec", dont_inherit=True), names)
        names[job["entry_point"]] = names.of_answer(job["entry_point"])
        exec(test or compile(job["test"], _TEST_FILE, "exec", dont_inherit=True), names)
    except BaseException as error:
        failed = isinstance(error, AssertionError) and not isinstance(error, OfAnswer)
        return "failed" if failed else "error", _message(error, job["test"])
    return "passed", ""


def _message(error: BaseException, test: str) -> str:
    """The exception, and the line of the test that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _TEST_FILE]
    where = f" in `{test.splitlines()[lines[-1] - 1].strip()}`" if lines and lines[-1] else ""
    try:
        return describe(error) + where
    except BaseException:  # a remote object inside that cannot be printed, or is gone
        return type(error).__name__ + where


class Names(dict):
    """The test's globals: its own names, then builtins, then the answer's."""

    def __init__(self, peer: TesterPeer) -> None:
        """Ask `peer` for the answer's names."""
        super().__init__(__name__="test")
        self._peer = peer

    def of_answer(self, name: str) -> Any:
        """What the answer defines under this name.

        Raises:
            NameError: nothing.
        """
        found, value = self._peer.look_up(name)
        if not found:
            raise NameError(f"the answer does not define {name}")
        return value

    def __missing__(self, name: str) -> Any:
        """Python asks here before it looks among the builtins."""
        if name not in vars(builtins) and not name.startswith("__"):
            # asked for each time, since a call may have changed it
            found, value = self._peer.look_up(name)
            if found:
                return value
        raise KeyError(name)


class TesterPeer(Peer):
    """The test's end of the conversation."""

    reader = Reader
    trusted = True

    def __init__(self, connection: socket.socket) -> None:
        """Talk to the answer."""
        super().__init__(connection)
        self.lost: ConversationError | None = None
        """Why the answer cannot be reached any more."""
        self._classes = ClassesOfAnswer()

    def look_up(self, name: str) -> tuple[bool, Any]:
        """Whether the answer defines a name, and what it is."""
        reply = self.request("lookup", name)
        if type(reply) is not tuple or len(reply) != 2 or type(reply[0]) is not bool:
            self.lost = ConversationError("no reply to a lookup")
            raise self.lost
        return reply

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request of the answer."""
        if operation == "call":
            function, positional, named = arguments
            return function(*positional, **named), None
        if operation == "getattr":
            return self._attribute(*arguments), None
        return OF_A_TEST[operation](*arguments), None

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """An exception of the same class, or of what stands for it, marked as the answer's."""
        if original is None:
            kind_here = self._classes.of_name(kind)
            # not through Python code of the standard library, which may want other arguments
            return kind_here(*arguments) if kind.startswith("builtins:") else kind_here.__new__(kind_here, *arguments)
        remote, rows = original
        kind_here = self._classes.of_rows(rows)
        error = kind_here.__new__(kind_here, *arguments)
        vars(error)["original"] = remote
        return error

    def of_error_class(self, rows: Any) -> Any:
        """What stands for an exception class of the answer's."""
        return self._classes.of_rows(rows)

    def of_coroutine(self, number: int) -> Any:
        """A coroutine that runs the answer's, over there, when it is awaited."""
        remote = self._of_handle(number, True, 0)

        async def run_there() -> Any:
            return self.request("run", remote)

        return run_there()

    def name_of(self, value: Any) -> Handle | ErrorClass | Coroutine:
        """What is sent in the place of an object that cannot travel."""
        number = self._classes.number_of(value)
        return super().name_of(value) if number is None else Handle(number, of_sender=False)

    def _attribute(self, value: Any, name: str) -> Any:
        # functions, generators and modules lead to the test's globals, instances of its own classes are what it passed
        passable = type(value).__module__ == "test" or type(value) in (io.StringIO, io.BytesIO)
        if not passable or name.startswith("_"):
            raise AttributeError(name)
        return getattr(value, name)

    def _request(self, operation: str, arguments: tuple[Any, ...], containers: list[Any]) -> Any:
        if self.lost is not None:
            raise self.lost
        try:
            return super()._request(operation, arguments, containers)
        except ConversationError as error:
            self.lost = error
            raise
