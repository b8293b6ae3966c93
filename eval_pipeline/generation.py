"""Runs the engine in a child process, so that no judge is started from a process that holds vLLM."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from eval_pipeline.engine import Generation, generate_greedily
from verl_ext.errors import UserError


def generate_in_child(export: Path, prompts: Sequence[str], max_tokens: int) -> Generation:
    """Answer every prompt; the process that held the model has gone when this returns.

    Args:
        export: Hugging Face model directory with a chat template.
        prompts: user instructions.
        max_tokens: most new tokens of an answer.

    Raises:
        UserError: the model cannot be used, with the reason; or the child died, of lack of memory for one.
    """
    # spawned, not forked: a CUDA context does not survive a fork, nor do the parent's threads
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_settle_in) as pool:
        try:
            return pool.submit(generate_greedily, export, list(prompts), max_tokens).result()
        except BrokenProcessPool as error:
            raise UserError(
                f"The process that ran {export} in vLLM died, perhaps of lack of memory; its last words stand above."
            ) from error


def _settle_in() -> None:
    # libraries under vLLM print to descriptor 1 from C++; standard output is for the evaluation's own table
    os.dup2(2, 1)
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    # a parent that is killed cannot stop its worker, which would keep the model in memory for ever
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
