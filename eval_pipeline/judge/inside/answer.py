"""The process that runs an answer: it binds itself to its limits, then runs the program once."""

from __future__ import annotations

import atexit
import json
import os
import random
import resource
import socket
import sys
import traceback
import types
from typing import Any

import binding
import frames
import standard_files
from answer_peer import AnswerPeer
from peer import ConversationError, describe

_setrlimit = resource.setrlimit  # before answers get another one (`binding.prepare`)
_MESSAGE_CHARS = 500


def run(limits: list[tuple[int, tuple[int, int]]], kind: str, files: binding.Files, directory: str, place: Any) -> None:
    """Become the answer; does not return.

    Args:
        limits: see `binding.resource_limits`.
        kind: "function" or "program".
        files: what it needs.
        directory: its own, empty.
        place: where it runs (`place.py`).
    """
    is_open = False
    try:
        os.setsid()
        preamble, program = frames.read_program(files.program)
        binding.take_files(files)
        is_open = True
        os.chdir(directory)
        for limit in limits:
            _setrlimit(*limit)
        binding.confine(place.policy, place.drop_user)
        random.seed(0)
    except BaseException:
        if is_open:
            _say({"failed": traceback.format_exc()})
        os._exit(1)
    code = _compile(program)
    file = f"{directory}/answer.py"
    if kind == "program":
        standard_files.make_openable()
        os._exit(_finish(_run_program(preamble, code, file)))
    _serve_function(preamble, code, file)
    os._exit(1)


def _compile(program: str) -> types.CodeType:
    """The program; says on the status pipe whether it compiled, and closes it before anything of the answer runs."""
    try:
        code = compile(program, "<answer>", "exec", dont_inherit=True)
    except BaseException as error:  # deep nesting raises MemoryError or RecursionError, a null byte ValueError
        _say({"syntax_error": describe(error)[:_MESSAGE_CHARS]})
        os._exit(1)
    _say({"compiled": True})
    os.close(binding.STATUS)
    return code


def _say(status: dict[str, Any]) -> None:
    os.write(binding.STATUS, json.dumps(status).encode())


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
    connection = socket.socket(fileno=binding.RPC)
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
