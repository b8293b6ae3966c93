"""The process that runs tests. It holds what the answer must not see, and receives only plain values from it."""

from __future__ import annotations

import _thread
import builtins
import io
import marshal
import math
import random
import re
import reprlib
import resource
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any

import protocol
import remote
import values
from rpc import ConversationError, GoneError, Peer, describe

_TEST_FILE, _PREAMBLE_FILE = "<test>", "<preamble>"
_MESSAGE_CHARS = 500
_SHOWN_BITS = 4096
_MB = 1 << 20
_EXTRA_MEMORY_MB = 256
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_OF_FUNCTIONS = frozenset(("__name__", "__qualname__", "__doc__"))
"""What an answer may read of a function or class of the test."""
_PROBES = frozenset(("lookup", "getattr", "next", "iter", "len", "getitem", "hash", "str", "repr", "format"))
"""Operations whose exceptions Python and its libraries may handle, such as the end of an iteration."""
_TAKES_ALL = re.compile(r"\bexcept\s*:|\.exception\(|\breturn_exceptions\b")
"""Code that takes any exception, the last two from a `Future` and from `asyncio.gather`."""
_RAISED = "@raised"
_MAX_GROWTH_KB = 32 << 10
"""A process whose memory has grown by more than this runs no further tests."""


def work(fds: list[int], options: dict[str, Any], policy_for: Any) -> None:
    """Run the tests that arrive on the descriptor, each with a connection to its answer, until one leaves a trace."""
    control = socket.socket(fileno=fds[0])
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # see `confinement.prepare`
    max_kb, num_modules = _memory_kb() + _MAX_GROWTH_KB, len(sys.modules)
    is_clean = True
    while is_clean and (received := protocol.receive(control, max_fds=1)) is not None:
        job, blob, (connection,) = received
        _limit(job["limits"])
        random.seed(0)
        delay_s = _delay_s()
        with socket.socket(fileno=connection) as answer:
            peer = TesterPeer(answer)
            outcome, message = _judge(job, blob, peer)
        _set_timers(0, 0)
        # what an answer made this process allocate or import must not affect the next answer
        is_small = _memory_kb() < max_kb and len(sys.modules) == num_modules
        is_clean = job["leaves_no_trace"] and is_small and (peer.lost is None or isinstance(peer.lost, GoneError))
        reply = {"outcome": outcome, "message": message[:_MESSAGE_CHARS], "is_clean": is_clean}
        # when an answer has replied, the time until this process runs again is not the answer's
        reply["waited_s"] = max(0.0, peer.waited_s - (_delay_s() - delay_s))
        protocol.send(control, reply)


def _judge(job: dict[str, Any], compiled: bytes, peer: TesterPeer) -> tuple[str, str]:
    outcome, message = run_test(job, compiled, peer)
    if peer.lost is None:
        return outcome, message
    # without its answer, the outcome of the test does not count
    return "lost" if isinstance(peer.lost, GoneError) else "error", str(peer.lost)


def _delay_s() -> float:
    """For how long this process has waited for a processor; infinite if the kernel does not tell."""
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, LookupError):
        return math.inf


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
    # no handler, so the kernel ends this process whatever it is doing
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def run_test(job: dict[str, Any], compiled: bytes, peer: TesterPeer) -> tuple[str, str]:
    """Run a test.

    Args:
        job: preamble and test as text, and the entry point.
        compiled: marshalled code of preamble and test; empty if they do not compile.
        peer: this end of the conversation with the answer.

    Returns:
        "passed", "failed" (by an assertion of the test) or "error", and a message.
    """
    names = TestNamespace(peer)
    names["@explain"] = explain_comparison
    peer.sources = {_TEST_FILE: job["test"], _PREAMBLE_FILE: job.get("preamble", "")}
    try:
        preamble, test = marshal.loads(compiled) if compiled else (None, None)
        exec(preamble or compile(job["preamble"], _PREAMBLE_FILE, "exec", dont_inherit=True), names)
        found, names[job["entry_point"]] = peer.look_up(job["entry_point"])
        if not found:
            raise NameError(f"the answer does not define {job['entry_point']}")
        exec(test or compile(job["test"], _TEST_FILE, "exec", dont_inherit=True), names)
    except BaseException as error:
        return "failed" if remote.is_of_test(error) else "error", _message(error, job["test"])
    if (unhandled := peer.unhandled()) is not None:
        return "error", f"the answer raised {unhandled.__name__}, which the test does not handle"
    return "passed", ""


class _PlainRepr(reprlib.Repr):
    """Abbreviates plain values; shows only the type of other objects, because their `__repr__` may run the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 4
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 10
        self.maxstring = self.maxother = 100

    def repr1(self, value: Any, level: int) -> str:
        """One value at a level of nesting."""
        if type(value) is int and value.bit_length() > _SHOWN_BITS:  # Python refuses to print very long numbers
            return f"<int of {value.bit_length()} bits>"
        if type(value) in values.UNCHANGEABLE or type(value) in (list, tuple, dict, set, frozenset):
            return super().repr1(value, level)
        return "<object>" if isinstance(value, remote.RemoteProxy) else f"<{type(value).__name__}>"


_REPR = _PlainRepr()


def explain_comparison(left: Any, symbol: str, right: Any) -> str:
    """The message of an assertion whose comparison failed, with the values of both sides."""
    return f"{_REPR.repr(left)} {symbol} {_REPR.repr(right)} is false"


def _message(error: BaseException, test: str) -> str:
    """The exception, and the line of the test that it came from."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _TEST_FILE]
    where = f" in `{test.splitlines()[lines[-1] - 1].strip()}`" if lines and lines[-1] else ""
    try:
        return describe(error) + where
    except BaseException:  # it contains a remote object that cannot be printed or is gone
        return type(error).__name__ + where


class TestNamespace(dict):
    """The test's globals: the test's own names, then builtins, then the answer's names."""

    def __init__(self, peer: TesterPeer) -> None:
        super().__init__(__name__="test")
        self._peer = peer

    def __missing__(self, name: str) -> Any:
        """Called by Python before it looks up builtins."""
        if name not in vars(builtins) and not name.startswith("__"):
            # looked up each time, because a call may have changed it
            found, value = self._peer.look_up(name)
            if found:
                return value
        raise KeyError(name)


class TesterPeer(Peer):
    """The test's end of the conversation.

    Attributes:
        lost: why the answer can no longer be reached.
        waited_s: wall-clock seconds that the test's only thread has waited for the answer.
        sources: test and preamble, by file name.
    """

    reader = values.Reader
    trusted = True

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.lost: ConversationError | None = None
        self.waited_s = 0.0
        self.sources: dict[str, str] = {}
        self._classes = remote.AnswerExceptionClasses()
        self._converted: dict[tuple[Any, ...], Any] = {}
        self._generators_send: Any = None
        """The most recently looked up `send` of an object of the answer."""
        self._failed: AssertionError | None = None
        """An assertion of the test that failed in a function that the answer called during the current request."""
        self._num_raised: dict[type, int] = {}
        """How many exceptions of each class the answer raised and has not got back."""
        self._offered: set[type] = set()
        """Exception classes that the test took from the answer's names or attributes."""

    def look_up(self, name: str) -> tuple[bool, Any]:
        """Whether the answer defines a name, and its value."""
        reply = self.request("lookup", name)
        if type(reply) is not tuple or len(reply) != 2 or type(reply[0]) is not bool:
            self.lost = ConversationError("no reply to a lookup")
            raise self.lost
        return reply

    def request(self, operation: str, *arguments: Any) -> Any:
        """Request an operation from the answer.

        Until an object changes, each conversion of it returns the same value. If it returned another number each time,
        a test that converts it twice could accept it as the root of a polynomial.
        """
        if operation not in remote.CONVERSIONS or not _are_constant(arguments):
            return super().request(operation, *arguments)
        key = (
            operation,
            *((type(part), id(part) if isinstance(part, remote.RemoteProxy) else part) for part in arguments),
        )
        if key not in self._converted:
            result = super().request(operation, *arguments)
            if type(result) not in values.UNCHANGEABLE:
                return result
            self._converted[key] = result
        return self._converted[key]

    def attribute(self, value: remote.RemoteProxy, name: str) -> Any:
        """An attribute of an object of the answer."""
        found = super().attribute(value, name)
        if name != "throw":
            self._generators_send = found if name == "send" else self._generators_send
            return found

        def throw(*arguments: Any) -> Any:
            error = next((part for part in arguments if isinstance(part, BaseException)), None)
            if error is None:
                return found(*arguments)
            self._return(error)
            return self._handed_over("throw", value, error)

        return throw

    def leave(self, manager: remote.RemoteProxy, error: BaseException | None) -> Any:
        """Leave a `with` block of a context manager of the answer.

        Returns:
            Whether it swallows the error, which it may do only if that skips no assertion of the test.
        """
        if error is None:
            return super().leave(manager, error)
        may_swallow = not remote.is_of_test(error) and not skips_assertions(sys._getframe(2), self.sources)
        try:
            swallows = self._handed_over("exit", manager, error) and may_swallow
            if swallows:
                self._return(error)
            return swallows
        except ConversationError:
            raise
        except BaseException:
            if may_swallow:
                raise
            return False

    def _handed_over(self, operation: str, value: remote.RemoteProxy, error: BaseException) -> Any:
        """Let the answer handle an exception. A failed assertion of the test is raised again."""
        try:
            return self.request(operation, value, *remote.description_of(error))
        finally:
            if remote.is_of_test(error) and self.lost is None:
                raise error

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request of the answer."""
        try:
            return self._perform(operation, arguments), None
        except AssertionError as error:
            if not remote.is_of_test(error):
                raise
            self._failed = self._failed or error
            raise AssertionError from None  # the answer must not see the message
        except BaseException as error:
            self._return(error)
            raise

    def unhandled(self) -> type | None:
        """An exception class of the answer that something must have handled, but not the test by naming it or a base.

        Python and its libraries treat some exceptions as the end of an iteration, as a skipped test, or as none at all,
        if they come out of a method or thread of the test. That must not pass assertions that never ran.
        """
        if not self._num_raised or _TAKES_ALL.search("\n".join(self.sources.values())):
            return None
        words = self._words()
        return next((kind for kind in self._num_raised if not self._may_handle(kind, words)), None)

    def _words(self) -> frozenset[str]:
        """The words of the test, except the names of exceptions that it raises itself."""
        return frozenset(re.findall(r"\w+", re.sub(r"\braise\s+[\w.]+", "", "\n".join(self.sources.values()))))

    def _may_handle(self, kind: type, words: frozenset[str]) -> bool:
        bases = [base for base in kind.__mro__ if issubclass(base, BaseException)]
        return any(base in self._offered or remote.is_named(base, words) for base in bases)

    def _return(self, error: BaseException | None) -> None:
        """Note that the answer gets an exception back, and with it those that led to it."""
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            if vars(error).pop(_RAISED, False):
                kind = type(error)
                self._num_raised[kind] -= 1
                if self._num_raised[kind] == 0:
                    del self._num_raised[kind]
            error = error.__context__ if error.__cause__ is None else error.__cause__

    def _perform(self, operation: str, arguments: tuple[Any, ...]) -> Any:
        if operation == "call":
            function, positional, named = arguments
            return function(*positional, **named)
        if operation in ("getattr", "setattr", "delattr"):
            return self._attribute(operation, *arguments)
        if operation in remote.TAKE_AN_ERROR:
            value, *described = arguments
            arguments = value, None if described == [None] else self.error_of(*described)
        if operation in remote.TEST_INSTANCE_OPS and any(map(_is_passable, arguments)):
            return remote.TEST_INSTANCE_OPS[operation](*arguments)
        return remote.TEST_OBJECT_OPS[operation](*arguments)

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """An exception of the same class or its proxy, marked as the answer's."""
        if original is None:
            kind_here = self._classes.of_name(kind)
            # avoid `__init__` of standard-library classes, which may take other arguments
            return kind_here(*arguments) if kind.startswith("builtins:") else kind_here.__new__(kind_here, *arguments)
        instance, rows = original
        kind_here = self._classes.of_rows(rows)
        error = kind_here.__new__(kind_here, *arguments)
        vars(error)["original"] = instance
        return error

    def of_error_class(self, rows: Any) -> Any:
        """The proxy for an exception class of the answer."""
        return self._classes.of_rows(rows)

    def of_coroutine(self, number: int) -> Any:
        """A coroutine that, when awaited, runs the answer's coroutine on the other side."""
        coroutine = self._of_handle(number, True, 0)

        async def run_there() -> Any:
            return self.request("run", coroutine)

        return run_there()

    def name_of(self, value: Any) -> values.Name:
        """What to send instead of an object that cannot be sent itself."""
        number = self._classes.number_of(value)
        return super().name_of(value) if number is None else values.Handle(number, of_sender=False)

    def _attribute(self, operation: str, value: Any, name: str, *new: Any) -> Any:
        if operation == "getattr" and name in _OF_FUNCTIONS and isinstance(value, _FUNCTIONS):
            return getattr(value, name)
        if not _is_passable(value) or name.startswith("_"):
            raise AttributeError(name)
        # methods of the test cannot be replaced
        if operation != "getattr" and (type(value).__module__ != "test" or callable(getattr(type(value), name, None))):
            raise AttributeError(name)
        return vars(builtins)[operation](value, name, *new)

    def _request(self, operation: str, arguments: tuple[Any, ...], containers: list[Any]) -> Any:
        if self.lost is not None:
            raise self.lost
        if operation in remote.CHANGES:
            self._converted.clear()
        outer, self._failed = self._failed, None
        try:
            result = super()._request(operation, arguments, containers)
            if operation in ("lookup", "getattr"):
                self._offered.update(_exception_classes(result))
            return result
        except ConversationError as error:
            self.lost = error
            raise
        except BaseException as error:
            if isinstance(error, StopIteration) and self._may_stop(operation, arguments):
                raise
            if (kind := remote.control_flow(error)) is not None and not self._expects(kind):
                # it would silently end a loop over `map`, or skip a test, and with it the assertions in there
                error = RuntimeError(f"the answer raised {type(error).__name__}").with_traceback(error.__traceback__)
            if operation not in _PROBES:
                vars(error)[_RAISED] = True
                self._num_raised[type(error)] = self._num_raised.get(type(error), 0) + 1
            raise error
        finally:
            failed, self._failed = self._failed, outer
            if failed is not None and self.lost is None:
                raise failed  # whatever the answer did with the exception

    def _take(self, size: int) -> bytes:
        started = time.monotonic()
        try:
            return super()._take(size)
        finally:
            if _thread._count() == 0:
                self.waited_s += time.monotonic() - started

    def _may_stop(self, operation: str, arguments: tuple[Any, ...]) -> bool:
        """Whether an operation is one that StopIteration ends properly."""
        return operation in ("next", "throw") or (operation == "call" and arguments[0] is self._generators_send)

    def _expects(self, kind: type) -> bool:
        """Whether the test names an exception that libraries use to control themselves, to handle it itself."""
        # unittest raises and handles its own, whatever the test names
        is_own = kind.__module__.startswith("unittest")
        return not is_own and kind.__name__ in self._words()


def _exception_classes(value: Any) -> Iterator[type]:
    """The exception classes in the reply to a lookup, or in an attribute: one, or several in a tuple."""
    if isinstance(value, tuple):
        for part in value:
            yield from _exception_classes(part)
    elif isinstance(value, type) and issubclass(value, BaseException):
        yield value


def _are_constant(arguments: tuple[Any, ...]) -> bool:
    return all(isinstance(part, remote.RemoteProxy) or type(part) in values.UNCHANGEABLE for part in arguments)


def _is_passable(value: Any) -> bool:
    """Whether an answer may read the value's attributes: only if it is an instance of the test's own classes.

    Functions, generators and modules lead to the test's globals.
    """
    return type(value).__module__ == "test" or type(value) in (io.StringIO, io.BytesIO)


def skips_assertions(frame: types.FrameType | None, sources: dict[str, str]) -> bool:
    """Whether the body of the test's `with` statement that is ending asserts, or calls functions that may assert.

    An answer that swallowed an exception there would pass assertions that never ran.

    Args:
        frame: the frame that handles the end; the next outer frame of the test counts.
        sources: test and preamble, by file name.
    """
    import ast  # rarely needed

    while frame is not None and frame.f_code.co_filename not in sources:
        frame = frame.f_back
    if frame is None:
        return True
    scope, line = {**frame.f_globals, **frame.f_locals}, frame.f_lineno
    bodies = [
        node.body
        for node in ast.walk(ast.parse(sources[frame.f_code.co_filename]))
        if isinstance(node, ast.With) and node.lineno <= line <= (node.items[-1].context_expr.end_lineno or 0)
    ]
    return not bodies or any(_may_assert(node, scope) for body in bodies for part in body for node in ast.walk(part))


def _may_assert(node: Any, scope: dict[str, Any]) -> bool:
    if type(node).__name__ != "Call":
        return type(node).__name__ == "Assert"
    if type(node.func).__name__ == "Name" and isinstance(scope.get(node.func.id), types.FunctionType):
        return True
    called = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
    return called.startswith("assert")
