"""The process that runs an answer: it confines itself, then runs the program once."""

from __future__ import annotations

import atexit
import builtins
import functools
import io
import json
import os
import random
import resource
import socket
import sys
import traceback
import types
from typing import Any

import confinement
import protocol
from rpc import AnswerPeer, ConversationError, describe

_setrlimit = resource.setrlimit  # before `confinement.prepare` replaces it
_MESSAGE_CHARS = 500


def run(
    limits: list[tuple[int, tuple[int, int]]], kind: str, files: confinement.Files, directory: str, jail: Any
) -> None:
    """Replace this process by the answer's program; does not return.

    Args:
        limits: see `confinement.resource_limits`.
        kind: "function" or "program".
        files: the answer's open files.
        directory: the answer's own, empty directory.
        jail: where the answer runs (`jail.py`).
    """
    is_open = False
    try:
        os.setsid()
        preamble, program = protocol.read_program(files.program)
        confinement.take_files(files)
        is_open = True
        os.chdir(directory)
        for limit in limits:
            _setrlimit(*limit)
        confinement.confine(jail.policy, jail.drop_user)
        random.seed(0)
    except BaseException as error:
        if is_open:
            _say({"failed": f"the answer's process cannot be confined: {describe(error)}"})
        os._exit(1)
    code = _compile(program)
    file = f"{directory}/answer.py"
    if kind == "program":
        _make_openable()
        os._exit(_finish(_run_program(preamble, code, file)))
    _serve_function(preamble, code, file)
    os._exit(1)


def _compile(program: str) -> types.CodeType:
    """Compile the program. Reports the result on the status pipe, and closes it before any code of the answer runs."""
    try:
        code = compile(program, "<answer>", "exec", dont_inherit=True)
    except BaseException as error:  # deep nesting raises MemoryError or RecursionError, a null byte ValueError
        _say({"syntax_error": describe(error)[:_MESSAGE_CHARS]})
        os._exit(1)
    _say({"compiled": True})
    os.close(confinement.STATUS)
    return code


def _say(status: dict[str, Any]) -> None:
    os.write(confinement.STATUS, json.dumps(status).encode())


def _module(name: str, preamble: str, file: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = file  # it does not exist, but programs ask for its folder
    sys.modules[name] = module  # where dataclasses and pickle look up the module of a class
    exec(compile(preamble, "<preamble>", "exec", dont_inherit=True), module.__dict__)
    return module


def _run_program(preamble: str, code: types.CodeType, file: str) -> int:
    """Run the answer like a Python script; returns its exit status."""
    status = _exit_status(lambda: exec(code, _module("__main__", preamble, file).__dict__))
    return _exit_status(_end_as_the_interpreter) or status


def _end_as_the_interpreter() -> None:
    """Wait for threads, then run the exit handlers."""
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
        except BaseException:  # the answer replaced the stream or closed its descriptor
            return status or 120
    return status


def _serve_function(preamble: str, code: types.CodeType, file: str) -> None:
    """Run the answer to define its functions, then serve the test until it is done."""
    connection = socket.socket(fileno=confinement.RPC)
    module = _module("answer", preamble, file)
    try:
        exec(code, module.__dict__)
    except BaseException:  # SystemExit too: an answer that exits has passed nothing
        traceback.print_exc()
        os._exit(_finish(1))
    try:
        AnswerPeer(connection, module.__dict__).serve()
    except ConversationError:
        os._exit(_finish(1))


# Standard streams by name: `/dev/stdin` is a link into /proc, which answers do not see

_NUMBERS = {f"/dev/{name}": number for number, name in enumerate(("stdin", "stdout", "stderr"))}
_NUMBERS |= {f"/dev/fd/{number}": number for number in range(3)}
_NUMBERS |= {f"/proc/self/fd/{number}": number for number in range(3)}


def _make_openable() -> None:
    """Replace `open` in this process, so that a program can open its standard streams by name."""
    # not a plain function, which as an attribute of a class would become a method, unlike the real one
    builtins.open = io.open = functools.update_wrapper(functools.partial(_open), io.open)


def _open(file: Any, *arguments: Any, **named: Any) -> Any:
    number = _NUMBERS.get(str(file)) if isinstance(file, (str, os.PathLike)) else None
    return _opened(file if number is None else os.dup(number), *arguments, **named)


_opened = io.open
