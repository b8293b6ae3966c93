"""The process that runs a reward function of the user's own: `python -m ... FILE FUNCTION`, calls in, scores out.

It reads pickled argument lists from its input and writes pickled replies; what the function prints goes to standard
error. Whoever started it kills it when a call takes too long.
"""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

from verl_ext.command_line import process_words
from verl_ext.parent_death import end_with_parent

SIZE = struct.Struct(">I")


def main() -> None:
    """Load the function, say so, then serve calls until the input ends."""
    path, name = process_words(
        "verl_ext.grpo.rewards.custom_process",
        "Runs a reward function of the user's own.",
        "bash run_grpo.sh 2 'reward.functions=[mine.py:reward]'",
        "file",
        "function",
    )
    end_with_parent()
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        function = load_function(path, name)
    except BaseException as error:
        _reply(output, (None, _describe(error)))
        return
    _reply(output, (None, None))
    while head := sys.stdin.buffer.read(SIZE.size):
        arguments = pickle.loads(sys.stdin.buffer.read(SIZE.unpack(head)[0]))
        _reply(output, _outcome(function, arguments))


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function of this name in a Python file.

    Raises:
        AttributeError: the file does not define it; anything else that importing the file raises.
    """
    spec = importlib.util.spec_from_file_location("custom_reward", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        others = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise AttributeError(f"it has no {name!r}, but {', '.join(others) or 'no function'}")
    return getattr(module, name)


def _outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[float | None, str | None]:
    """Score and failure, one of them None; a score may come in a mapping under `score`, as verl's do."""
    try:
        value = function(**arguments)
        score = float(value["score"] if isinstance(value, dict) else value)
        if not math.isfinite(score):
            raise ValueError(f"it returned {score}")
        return score, None
    except BaseException as error:  # SystemExit too: whatever it does, it only costs this sample its reward
        return None, _describe(error)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


def _reply(output: Any, reply: tuple[float | None, str | None]) -> None:
    data = pickle.dumps(reply)
    output.write(SIZE.pack(len(data)) + data)
    output.flush()


if __name__ == "__main__":
    main()
