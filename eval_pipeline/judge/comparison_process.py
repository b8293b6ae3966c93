"""Makes the comparisons of `comparisons.py`, one after the other; ends when its input does."""

from __future__ import annotations

import os
import signal
from typing import Any

from eval_pipeline.judge.inside import frames, kernel
from eval_pipeline.judge.numeric_answer import is_right
from eval_pipeline.judge.verdicts import outputs_match
from verl_ext.cli import child_process_args
from verl_ext.commands import program


def main() -> None:
    """Reply to each question on standard output."""
    child_process_args(
        "eval_pipeline.judge.comparison_process",
        "Compares answers with references, and outputs with expected ones.",
        f"{program('eval')} run --checkpoint models/mine --recipe gsm8k",
    )
    # a parser that hangs does not see its input end
    kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
    replies = os.dup(1)
    os.dup2(2, 1)  # what a parser prints is no reply
    _reply(replies, {"ready": True})
    while (received := frames.read(0)) is not None:
        question, blob = received
        _reply(replies, _judge_outputs(question, blob) if blob else _judge_answer(question))


def _judge_outputs(question: dict[str, Any], blob: bytes) -> dict[str, object]:
    size = question["size"]
    actual, expected = (part.decode(errors="surrogatepass") for part in (blob[:size], blob[size:]))
    return {"right": outputs_match(actual, expected, question["tolerance"])}


def _judge_answer(question: dict[str, str]) -> dict[str, object]:
    try:
        right = is_right(question["answer"], question["reference"])
    except (ArithmeticError, ValueError, RecursionError, MemoryError) as error:
        return {"right": False, "message": f"the answer could not be read: {type(error).__name__}"}
    return {"right": bool(right), "message": "" if right else f"expected {question['reference']!r}"}


def _reply(fd: int, message: dict[str, object]) -> None:
    data = frames.pack(message)
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main()
