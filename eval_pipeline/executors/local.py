"""Workers as processes of this machine, each with its own GPUs where there are some."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

from eval_pipeline.config import EvalConfig
from eval_pipeline.executors.executor import BATCHES_PER_WORKER, Executor
from eval_pipeline.executors.gpus import gpus_for_workers
from eval_pipeline.executors.slots import Slot
from eval_pipeline.work.batch import Batch, Event, Failed, Lost
from eval_pipeline.work.worker import Worker
from verl_ext.errors import UserError
from verl_ext.processes import DEVICES

END_S = 30.0
"""How long a worker may take to end its engine and its judge before it is killed."""


class LocalExecutor(Executor):
    """Processes of this machine; a worker that died is replaced when the next batch comes.

    Args:
        recipe: says how many workers, and what they do.
    """

    def __init__(self, recipe: EvalConfig) -> None:
        self._recipe = recipe
        gpus = gpus_for_workers(recipe.executor.num_workers, recipe.engine)
        self._workers = [_LocalWorker(recipe, devices) for devices in gpus]

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.ask_to_end()
        for worker in self._workers:
            worker.end()

    def has_room_for(self, export: Path | None) -> bool:
        """See `Executor`."""
        return any(worker.slot.takes(export) for worker in self._workers)

    def submit(self, batch: Batch) -> None:
        """See `Executor`."""
        free = [worker for worker in self._workers if worker.slot.takes(batch.export)]
        min(free, key=lambda worker: worker.slot.cost(batch.export)).submit(batch)

    def events(self, timeout_s: float) -> list[Event]:
        """See `Executor`."""
        connections = {worker.connection: worker for worker in self._workers if worker.connection is not None}
        ready = wait(list(connections), timeout_s)
        return [event for each, worker in connections.items() if each in ready for event in worker.receive(each)]


class _LocalWorker:
    """One worker process, its connection and what it has to do."""

    def __init__(self, recipe: EvalConfig, devices: str | None) -> None:
        self._recipe, self._devices = recipe, devices
        self._process: BaseProcess | None = None
        self.connection: Connection | None = None
        self.slot = Slot()

    def submit(self, batch: Batch) -> None:
        connection = self.connection or self._start()
        self.slot.give(batch)
        try:
            connection.send(batch)
        except OSError:
            pass  # it has just died; `receive` reads the end of the connection and reports the batch as lost

    def _start(self) -> Connection:
        # spawned: the driver has threads, and a fork would copy its locks
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, self._recipe, self._devices))
        resource_tracker.ensure_running()  # started by `start`, it would let Ctrl-C through again
        with _ctrl_c_held_back():
            process.start()
        theirs.close()
        self._process, self.connection = process, ours
        return ours

    def receive(self, connection: Connection) -> list[Event]:
        """Everything that has come; a dead worker's batches are lost."""
        events: list[Event] = []
        try:
            while connection.poll():
                events.append(connection.recv())
        except (EOFError, OSError):
            return [*self.slot.forget_ended(events), *self._lose(connection)]
        return self.slot.forget_ended(events)

    def _lose(self, connection: Connection) -> list[Lost]:
        assert self._process is not None
        self._process.join()
        reason = f"the worker process died ({_words(self._process.exitcode)})"
        lost = [Lost(batch, reason) for batch in self.slot.batches]
        connection.close()
        self._process, self.connection, self.slot = None, None, Slot()
        return lost

    def ask_to_end(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def end(self) -> None:
        if self._process is not None:
            self._process.join(END_S)
            self._process.kill()
            self._process.join()


@contextmanager
def _ctrl_c_held_back() -> Iterator[None]:
    """A process that is started here takes no Ctrl-C until it says how; this one gets it afterwards."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def _words(exitcode: int | None) -> str:
    return f"signal {-exitcode}, possibly out of memory" if exitcode and exitcode < 0 else f"exit code {exitcode}"


def _serve(connection: Connection, recipe: EvalConfig, devices: str | None) -> None:
    """The life of a worker process: batches in, events out, until the driver closes the connection or dies."""
    _settle_in(devices)
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock, suppress(OSError):  # the driver has gone, and `_batches` ends this process
            connection.send(event)

    try:
        with Worker(recipe) as worker:
            pool = ThreadPoolExecutor(BATCHES_PER_WORKER)
            for batch in _batches(connection):
                pool.submit(worker.work, batch, emit)
    except UserError as error:  # no judge can work here
        for batch in _batches(connection):
            emit(Failed(batch.id, str(error)))
    os._exit(0)  # what is still under way is of no use to anybody


def _batches(connection: Connection) -> Iterator[Batch]:
    while True:
        try:
            yield connection.recv()
        except (EOFError, OSError):
            return


def _settle_in(devices: str | None) -> None:
    # standard output belongs to the driver's tables; Ctrl-C reaches the whole group, and the driver decides
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if devices is not None:
        os.environ[DEVICES] = devices
