"""The process that holds vLLM; started by `vllm_child.py`."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection

from eval_pipeline.engines.messages import Alive, Answered, Ask, Done, Loaded, Refused
from eval_pipeline.engines.vllm_model import VllmModel
from verl_ext.cli import child_process_args
from verl_ext.commands import program
from verl_ext.errors import STOP_SIGNALS, UserError

SIGN_S = 1.0
"""How often the owner hears that work continues; more often if its time limit is less than four times this."""


def main(descriptor: int, owner: int) -> None:
    """Load a model and answer, until the owner closes the connection or dies.

    Args:
        descriptor: of the connection to the owner.
        owner: process id.
    """
    os.set_inheritable(descriptor, False)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals every process; the owner decides when this one ends
    threading.Thread(target=_leave_with, args=(owner,), daemon=True).start()
    serve_until_owner_leaves(Connection(descriptor))


def serve_until_owner_leaves(connection: Connection) -> None:
    """Load the model and answer until the owner closes the connection.

    Raises:
        Exception: whatever vLLM raises; the owner reads its traceback in the log.
    """
    try:
        _serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        if not _owner_has_left(connection):  # the pipes of vLLM's own processes break with the same errors
            raise


def _owner_has_left(connection: Connection) -> bool:
    try:
        while connection.poll():
            connection.recv()
    except (EOFError, OSError):
        return True
    return False


def _leave_with(owner: int) -> None:
    # an owner that is killed cannot end this process, which would keep the model in memory forever
    import psutil

    if os.getppid() == owner:
        try:
            psutil.Process(owner).wait()
        except psutil.NoSuchProcess:
            pass  # it died just now, and this process ends below
    os._exit(1)


def _serve(connection: Connection) -> None:
    load = connection.recv()
    try:
        model = VllmModel(load.settings, load.model)
    except UserError as error:
        connection.send(Refused(str(error)))
        return
    try:
        connection.send(Loaded(model.protocol, model.seconds))
        while True:
            message = connection.recv()
            if isinstance(message, Ask):  # an Abandon may arrive after the last answer
                _answer(connection, model, message, min(SIGN_S, load.settings.timeout_s / 4))
    finally:
        model.close()


def _answer(connection: Connection, model: VllmModel, ask: Ask, sign_s: float) -> None:
    started = signed = time.monotonic()
    steps = model.answer(ask.requests, ask.sampling)
    for finished in steps:
        for index, answer in finished:
            connection.send(Answered(index, answer))
        if time.monotonic() - signed >= sign_s:  # here, not in a thread: a sign means that a step was completed
            connection.send(Alive())
            signed = time.monotonic()
        if connection.poll():
            connection.recv()  # Abandon, or EOFError
            steps.close()
            break
    connection.send(Done(time.monotonic() - started))


if __name__ == "__main__":
    words = child_process_args(
        "eval_pipeline.engines.vllm_process",
        "Holds vLLM for an evaluation.",
        f"{program('eval')} run --checkpoint models/mine",
        "descriptor",
        "owner",
    )
    main(*map(int, words))
