"""The process that runs an answer: it binds itself to its limits, then runs the program once."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import random
import resource
import signal
import socket
import sys
import traceback
import types
from dataclasses import dataclass
from typing import Any

import kernel
import seccomp
import standard_files
from aliases import containers_of, contains_any
from errors import known_class, known_name, rows_of
from operations import OF_AN_ANSWER
from peer import UNCHANGEABLE, CallError, ConversationError, Peer, describe
from values import Coroutine, ErrorClass, Handle, TrustingReader

_RPC, _STATUS, _FIRST_FREE = 3, 4, 5
_MB = 1 << 20
_STACK_BYTES = 64 * _MB
_MOST_FILES = 64


@dataclass(frozen=True)
class Files:
    """Open files of the process that it keeps."""

    stdin: int
    stdout: int
    stderr: int
    rpc: int
    """Socket to the test; /dev/null for a program."""
    status: int
    """Pipe on which this file, and never the answer, says how compiling went."""


def run(job: dict[str, Any], kind: str, files: Files, directory: str, place: Any) -> None:
    """Become the answer; does not return.

    Args:
        job: program, preamble and limits.
        kind: "function" or "program".
        files: what to keep open.
        directory: its own, empty.
        place: where it runs (`place.py`).
    """
    status = None
    try:
        os.setsid()
        _take_files(files)
        status = os.fdopen(_STATUS, "w")
        os.chdir(directory)
        _limit(job["limits"], place.num_unlimited)
        _confine(place.policy, place.drop_user)
        _refresh_standard_streams()
        random.seed(0)
    except BaseException:
        if status is not None:
            json.dump({"failed": traceback.format_exc()}, status)
            status.flush()
        os._exit(1)
    code = _compile(job, status)
    file = f"{directory}/answer.py"
    if kind == "program":
        standard_files.make_openable()
        os._exit(_finish(_run_program(job["preamble"], code, file)))
    _serve_function(job["preamble"], code, file)
    os._exit(1)


def _take_files(files: Files) -> None:
    kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in (files.stdin, files.stdout, files.stderr, files.rpc)]
    kept.append(fcntl.fcntl(files.status, fcntl.F_DUPFD, 16))
    for target, fd in enumerate(kept):
        os.dup2(fd, target, inheritable=target <= 2)
    os.closerange(_FIRST_FREE, 1 << 16)


def _limit(limits: dict[str, Any], num_unlimited: int) -> None:
    cpu_s = int(limits["cpu_s"]) + 1
    wanted = {
        resource.RLIMIT_AS: limits["memory_mb"] * _MB,
        resource.RLIMIT_CPU: cpu_s,  # the soft limit is the hard one: its signal cannot be caught
        resource.RLIMIT_FSIZE: limits["file_mb"] * _MB,
        resource.RLIMIT_NOFILE: _MOST_FILES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_STACK: _STACK_BYTES,  # of the first thread; it grows only when used
    }
    if num_unlimited >= 0:
        wanted[resource.RLIMIT_NPROC] = limits["num_processes"] + num_unlimited
    for limit, value in wanted.items():
        highest = resource.getrlimit(limit)[1]
        value = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(limit, (value, value))


def _confine(policy: Any, drop_user: bool) -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if drop_user:
        kernel.become_nobody()
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # the census may read its memory's size
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    if policy is not None:
        policy()
    seccomp.install(seccomp.OF_ANSWERS)


def _refresh_standard_streams() -> None:
    options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
    sys.stdin = sys.__stdin__ = open(0, **options)
    sys.stdout = sys.__stdout__ = open(1, "w", **options)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, **options)
    sys.argv = ["answer.py"]


def _compile(job: dict[str, Any], status: Any) -> types.CodeType:
    """The program; says on the status pipe whether it compiled, and closes it before anything of the answer runs."""
    try:
        code = compile(job["program"], "<answer>", "exec", dont_inherit=True)
    except BaseException as error:  # deep nesting raises MemoryError or RecursionError, a null byte ValueError
        json.dump({"syntax_error": describe(error)}, status)
        status.flush()
        os._exit(1)
    json.dump({"compiled": True}, status)
    status.close()
    return code


def _module(name: str, preamble: str, file: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = file  # there is none, but programs ask for its folder
    sys.modules[name] = module  # dataclasses and pickle look a class's module up by its name
    exec(compile(preamble, "<preamble>", "exec", dont_inherit=True), module.__dict__)
    return module


def _run_program(preamble: str, code: types.CodeType, file: str) -> int:
    """Run it as Python runs a script; returns its exit status."""
    status = _exit_status(lambda: exec(code, _module("__main__", preamble, file).__dict__))
    return _exit_status(_end_as_the_interpreter) or status


def _end_as_the_interpreter() -> None:
    """Wait for threads, then call what was registered for the exit."""
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    atexit._run_exitfuncs()


def _exit_status(run: Any) -> int:
    try:
        run()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _finish(status: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except BaseException:  # what the answer put there, or a closed descriptor
            return status or 120
    return status


def _serve_function(preamble: str, code: types.CodeType, file: str) -> None:
    """Define what the answer defines, then do what the test asks until it is done."""
    connection = socket.socket(fileno=_RPC)
    module = _module("answer", preamble, file)
    try:
        exec(code, module.__dict__)
    except BaseException:  # SystemExit too: an answer that leaves has passed nothing
        traceback.print_exc()
        os._exit(_finish(1))
    try:
        AnswerPeer(connection, module.__dict__).serve()
    except ConversationError:
        os._exit(_finish(1))


class AnswerPeer(Peer):
    """The answer's end of the conversation."""

    reader = TrustingReader
    trusted = False

    def __init__(self, connection: socket.socket, namespace: dict[str, Any]) -> None:
        """Serve what `namespace` defines."""
        super().__init__(connection)
        self._namespace = namespace

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request of the test."""
        if operation == "lookup":
            return (arguments[0] in self._namespace, self._namespace.get(arguments[0])), None
        if operation == "call":
            return self._call(*arguments)
        return OF_AN_ANSWER[operation](*arguments), None

    def _call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if UNCHANGEABLE.issuperset(map(type, (*arguments, *named.values()))):
            return function(*arguments, **named), None
        containers = containers_of((arguments, named))
        before = self.dumps(containers)
        try:
            result = function(*arguments, **named)
        except BaseException as error:
            raise CallError(None if self.dumps(containers) == before else containers) from error
        alike = not contains_any(result, containers) and self.dumps(containers) == before
        return result, None if alike else containers

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """An exception of a function that the test passed."""
        return known_class(kind)(*arguments)

    def original_of(self, error: BaseException) -> Any:
        """An exception of a class of the answer's own, and the class."""
        rows = rows_of(type(error), self.number_of)
        return (error, rows) if rows else None

    def name_of(self, value: Any) -> Handle | ErrorClass | Coroutine:
        """What is sent in the place of an object that cannot travel."""
        if isinstance(value, type) and issubclass(value, BaseException) and known_name(value) is None:
            return ErrorClass(rows_of(value, self.number_of))
        if type(value) is types.CoroutineType:
            return Coroutine(self.number_of(value))
        return super().name_of(value)
