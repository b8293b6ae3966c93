"""A user's reward function: how it is loaded and called, what counts as a score, and the process that calls it.

The process, `python -m verl_ext.grpo.rewards.custom_process PATH_OR_MODULE FUNCTION`, receives `RewardedAnswer`s on
standard input and sends replies on standard output; what the function prints goes to standard error. A reply is a
score, None if the function does not apply to the answer, or a `RewardFailure`. The first reply is None if the function
can be called, or a failure.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, TypeAlias

from verl_ext.cli import child_process_args
from verl_ext.commands import program
from verl_ext.errors import UserError, one_line
from verl_ext.grpo.protocols import RewardError, RewardFailure
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.plugins import Plugin
from verl_ext.processes import end_with_parent

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of a function in a file; they are verl's."""
SIZE = struct.Struct(">I")
"""Size in bytes of the pickled reply that follows."""
Reply: TypeAlias = "float | RewardFailure | None"
_MAX_CHARACTERS = 500
"""Longest reason or signature in a message."""
_MAX_TRACEBACK_CHARACTERS = 4000


class UserFunction:
    """Loads a function and calls it in this process, where calls cannot be interrupted.

    Args:
        plugin: a function in a file, which is called with `ARGUMENTS` as verl does, or in a module, which is called
            with a `RewardedAnswer`.

    Raises:
        UserError: it cannot be loaded, is not a function, or cannot be called this way.
    """

    def __init__(self, plugin: Plugin) -> None:
        try:
            self._function = plugin.load()
        except SystemExit as error:
            raise UserError(
                f"{plugin.key} names {plugin.location}, which exits when it is loaded (SystemExit: {error.code}); "
                "put what it runs under `if __name__ == '__main__':`"
            ) from error
        self._by_keywords = plugin.is_file
        if not callable(self._function):
            raise UserError(f"{plugin.key} names {plugin}, which is not a function")
        check_signature(self._function, plugin)
        # one event loop for all calls, to which a function's clients, sessions and locks may stay bound
        self._runner = asyncio.Runner()

    def close(self) -> None:
        """Close the event loop of an asynchronous function."""
        self._runner.close()

    def __call__(self, answer: RewardedAnswer) -> float | None:
        """The score of one answer; None if the function does not apply to it.

        Raises:
            RewardError: the function raised, or returned something other than a finite number or None.
        """
        try:
            answer = copy.deepcopy(answer)  # a function may change what it gets, but not the dataset
            value = self._function(**_keywords(answer)) if self._by_keywords else self._function(answer)
            if inspect.iscoroutine(value):  # an asynchronous function
                value = self._runner.run(value)
        except BaseException as error:  # also SystemExit and KeyboardInterrupt: only this sample loses its reward
            reason = one_line(error)[:_MAX_CHARACTERS]
            raise RewardError(RewardFailure(reason, _traceback_of(error), kind=_kind_of(error))) from error
        return score_of(value)


def _kind_of(error: BaseException) -> str:
    """Name the exception and the line of the function's file that raised it, such as `KeyError in line 6`."""
    callers = (__file__, os.path.dirname(asyncio.__file__))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(callers)]
    lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
    return f"{type(error).__name__} in line {lines[-1]}" if lines else type(error).__name__


def score_of(value: Any) -> float | None:
    """Convert a function's return value to a number; from a mapping, take `score`, as verl does.

    Accepts numbers of Python, numpy and torch, and True and False as 1 and 0. As in TRL, None means that the function
    does not apply to the answer.

    Raises:
        RewardError: it is not a finite number.
    """
    if isinstance(value, Mapping):
        if "score" not in value:
            raise RewardError(RewardFailure("it returned a mapping without the key 'score'", kind="no score"))
        value = value["score"]
    if value is None:
        return None
    try:
        if callable(getattr(value, "item", None)):  # float() warns about an array, and about a tensor with a gradient
            value = value.item()
        if isinstance(value, str | bytes | bytearray):  # float() would read some of them
            raise TypeError
        score = float(value)
    except Exception:  # a user's class may raise anything
        shown = f"{value!r:.100}" if isinstance(value, str | bytes | int) else f"a {type(value).__name__}"
        failure = RewardFailure(f"it returned {shown}, which is not a number", kind=type(value).__name__)
        raise RewardError(failure) from None
    if not math.isfinite(score):
        raise RewardError(RewardFailure(f"it returned {score}, which is not a finite number", kind=f"{score}"))
    return score


def check_signature(function: Callable[..., Any], plugin: Plugin) -> None:
    """Refuse a function that cannot be called; parameters with defaults and `**kwargs` are allowed.

    Raises:
        UserError: with the function's parameters and the arguments of the call.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature; the first call checks them
        return
    try:
        signature.bind(**dict.fromkeys(ARGUMENTS)) if plugin.is_file else signature.bind(None)
    except TypeError as error:
        called = f"keyword arguments {', '.join(ARGUMENTS)}" if plugin.is_file else "one argument, a RewardedAnswer"
        fix = (
            "give it these parameters or **kwargs, and defaults to all others"
            if plugin.is_file
            else "change its parameters, or name it as path.py:function to have it called with verl's arguments"
        )
        raise UserError(
            f"the reward function {plugin} has the parameters {signature!s:.{_MAX_CHARACTERS}} but is "
            f"called with the {called} ({error}); {fix}"
        ) from error


def _keywords(answer: RewardedAnswer) -> dict[str, Any]:
    values = answer.data_source, answer.text, answer.ground_truth, dict(answer.extra_info)
    return dict(zip(ARGUMENTS, values))


def _traceback_of(error: BaseException) -> str:
    """The traceback without the frame of this module."""
    frames = error.__traceback__ and error.__traceback__.tb_next
    return "".join(traceback.format_exception(type(error), error, frames))[-_MAX_TRACEBACK_CHARACTERS:]


# The process


def main() -> None:
    """Load the function, reply, then serve calls until the input ends."""
    place, name = child_process_args(
        "verl_ext.grpo.rewards.custom_process",
        "Runs a user's reward function.",
        f"{program('grpo')} 2 'reward.functions=[mine.py:reward]'",
        "place",
        "function",
    )
    end_with_parent()
    calls, replies = Connection(os.dup(0), writable=False), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function, and what it starts, must not read calls
    os.dup2(2, 1)
    plugin = Plugin("reward.functions", place, name)
    if plugin.is_file:  # last, so that a neighbor replaces no installed module
        sys.path.append(str(Path(place).resolve().parent))
    try:
        function = UserFunction(plugin)
    except UserError as error:
        _send(replies, RewardFailure(str(error)))
        return
    _send(replies, None)
    with closing(function), suppress(EOFError):
        while True:
            answer = calls.recv()
            try:
                _send(replies, function(answer))
            except RewardError as error:
                _send(replies, error.failure)


def _send(replies: IO[bytes], reply: Reply) -> None:
    data = pickle.dumps(reply)
    replies.write(SIZE.pack(len(data)) + data)
    replies.flush()


if __name__ == "__main__":
    main()
