"""The process that runs a user's reward function: `python -m ... PLACE FUNCTION`, calls in, scores out.

It reads pickled `RewardedAnswer`s from standard input and writes pickled replies; what the function prints goes to
standard error. `RewardProcessPool` kills it when a call takes too long.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from typing import Any, TypeAlias

from verl_ext.cli import child_process_args
from verl_ext.commands import program
from verl_ext.errors import UserError
from verl_ext.grpo.protocols import RewardError, RewardFailure
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.user_function import UserFunction
from verl_ext.plugins import Plugin
from verl_ext.processes import end_with_parent

SIZE = struct.Struct(">I")
Reply: TypeAlias = "float | RewardFailure | None"
"""A score or a failure. The first reply is about loading: None, or why the function cannot be called."""


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
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        function = UserFunction(Plugin("reward.functions", place, name))
    except UserError as error:
        _send(output, RewardFailure(str(error)))
        return
    _send(output, None)
    while head := sys.stdin.buffer.read(SIZE.size):
        _send(output, _outcome(function, pickle.loads(sys.stdin.buffer.read(SIZE.unpack(head)[0]))))


def _outcome(function: UserFunction, answer: RewardedAnswer) -> Reply:
    try:
        return function(answer)
    except RewardError as error:
        return error.failure


def _send(output: Any, reply: Reply) -> None:
    data = pickle.dumps(reply)
    output.write(SIZE.pack(len(data)) + data)
    output.flush()


if __name__ == "__main__":
    main()
