"""Worker pools: the interface that all pools share, and the pool of local processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from eval_pipeline.config import EngineConfig, EvalConfig
from eval_pipeline.worker import MAX_LOSSES, Batch, BatchFailed, BatchFinished, BatchId, BatchLost, EvalWorker, Event
from verl_ext.commands import require_package
from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.hardware import DEVICES, visible_gpus

BATCHES_PER_WORKER = 2
"""One whose answers the engine generates, and one whose last answers are being judged."""
EXIT_TIMEOUT_S = 30.0
"""How long a worker may take to end its engine and its judge before it is killed."""


class PoolWorker(ABC):
    """The pool's view of a worker.

    Attributes:
        export: the model that the worker has loaded or is about to load; None before the first batch.
        batches: the batches that the worker has not finished.
    """

    def __init__(self) -> None:
        self.export: Path | None = None
        self.batches: dict[BatchId, Batch] = {}

    def has_room_for(self, export: Path | None) -> bool:
        """Whether a batch for this model would start soon, without unloading a model in use."""
        if not self.batches:
            return True
        return self.export == export and len(self.batches) < BATCHES_PER_WORKER

    def submit(self, batch: Batch) -> None:
        """Send a batch to the worker."""
        self.export = batch.export
        self.batches[batch.id] = batch
        self._send(batch)

    def receive(self) -> list[Event]:
        """All events that have arrived; if the worker died, its batches are lost."""
        events, death = self._drain()
        for event in events:
            if isinstance(event, BatchLost):
                warn(f"{event.reason}; retrying its batch, at most {MAX_LOSSES - 1} times")
            if isinstance(event, BatchFinished | BatchFailed | BatchLost):
                self.batches.pop(event.batch, None)
        if death is not None:
            if self.batches:
                warn(f"{death}; retrying its work, at most {MAX_LOSSES - 1} times")
            events += [BatchLost(batch, death) for batch in self.batches]
            self.batches.clear()
        return events

    @abstractmethod
    def _send(self, batch: Batch) -> None: ...

    @abstractmethod
    def _drain(self) -> tuple[list[Event], str | None]:
        """The events that have arrived and, if the worker died, why."""


class WorkerPool(ABC):
    """Workers, each with an engine and a judge. Leaving the context ends all of them."""

    def __init__(self) -> None:
        self._workers: Sequence[PoolWorker] = []

    @abstractmethod
    def __enter__(self) -> WorkerPool: ...

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    def has_room_for(self, export: Path | None) -> bool:
        """Whether a batch for this model would start soon, without unloading a model in use."""
        return any(worker.has_room_for(export) for worker in self._workers)

    def submit(self, batch: Batch) -> None:
        """Give a batch to a worker with room for it: the least busy, preferably with the model loaded."""
        free = [worker for worker in self._workers if worker.has_room_for(batch.export)]
        min(free, key=lambda worker: (len(worker.batches), worker.export != batch.export)).submit(batch)

    @abstractmethod
    def events(self, timeout_s: float) -> list[Event]:
        """Wait up to this long for events; returns all that have arrived.

        Raises:
            UserError: no worker can start.
        """


def require_engine(config: EvalConfig) -> None:
    """Refuse a configuration whose workers need vLLM on this machine if vLLM is not installed.

    Raises:
        UserError: vLLM is missing; the message names the command that installs it.
    """
    if config.executor.kind == "local" and config.engine.kind == "vllm":
        require_package("vllm")


def assign_gpus(num_workers: int | None, engine: EngineConfig) -> list[str | None]:
    """The GPUs of each worker of this machine, in the format of `CUDA_VISIBLE_DEVICES`; None if it needs none.

    Args:
        num_workers: as configured; None uses as many as the GPUs allow, or one on a CPU.
        engine: sets the number of GPUs per worker.

    Raises:
        UserError: there are not enough GPUs.
    """
    gpus = visible_gpus() if engine.kind == "vllm" else []
    if not gpus:
        return [None] * (num_workers or 1)
    size = engine.tensor_parallel_size
    groups = [",".join(gpus[start : start + size]) for start in range(0, len(gpus) - size + 1, size)]
    if len(groups) < (num_workers or 1):
        raise UserError(
            f"executor.num_workers={num_workers or 1} with engine.tensor_parallel_size={size} needs "
            f"{(num_workers or 1) * size} GPUs, but {len(gpus)} are visible; lower either value"
        )
    return list(groups[: num_workers or len(groups)])


def share_cores(config: EvalConfig, num_workers: int) -> EvalConfig:
    """The configuration of a worker on a machine with several: programs that share a core may hit their time limits."""
    share = max(1, len(os.sched_getaffinity(0)) // num_workers)
    return replace(config, judge=replace(config.judge, num_workers=config.judge.num_workers or share))


class LocalPool(WorkerPool):
    """Processes on this machine; a worker that died is replaced when it gets its next batch."""

    def __init__(self, config: EvalConfig) -> None:
        super().__init__()
        gpus = assign_gpus(config.executor.num_workers, config.engine)
        config = share_cores(config, len(gpus))
        self._workers: list[LocalWorker] = [LocalWorker(config, devices) for devices in gpus]

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close_connection()
        for worker in self._workers:
            worker.end()

    def events(self, timeout_s: float) -> list[Event]:
        connections = {worker.connection: worker for worker in self._workers if worker.connection is not None}
        ready = wait(list(connections), timeout_s)
        return [event for each, worker in connections.items() if each in ready for event in worker.receive()]


class LocalWorker(PoolWorker):
    """A worker process, started for its first batch.

    Attributes:
        connection: connection to the process; None while there is no process.
    """

    def __init__(self, config: EvalConfig, devices: str | None) -> None:
        super().__init__()
        self._config, self._devices = config, devices
        self._process: BaseProcess | None = None
        self.connection: Connection | None = None

    def _send(self, batch: Batch) -> None:
        connection = self.connection or self._start()
        try:
            connection.send(batch)
        except OSError:
            pass  # it has just died; `receive` finds the closed connection and reports the batch as lost

    def _start(self) -> Connection:
        # spawned, because a fork would copy the locks of this process's threads
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, self._config, self._devices))
        resource_tracker.ensure_running()  # started by `process.start`, it would unblock Ctrl-C
        # the new process inherits the block until it ignores Ctrl-C; this process receives Ctrl-C afterwards
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        theirs.close()
        self._process, self.connection = process, ours
        return ours

    def _drain(self) -> tuple[list[Event], str | None]:
        assert self.connection is not None
        events: list[Event] = []
        try:
            while self.connection.poll():
                events.append(self.connection.recv())
        except (EOFError, OSError):
            return events, self._reap()
        return events, None

    def _reap(self) -> str:
        """Forget a dead process; returns why it died."""
        assert self._process is not None and self.connection is not None
        self._process.join()
        code = self._process.exitcode
        how = f"signal {-code}, possibly out of memory" if code and code < 0 else f"exit code {code}"
        self.connection.close()
        self._process, self.connection, self.export = None, None, None
        return f"the worker process died ({how})"

    def close_connection(self) -> None:
        """Ask the process to exit."""
        if self.connection is not None:
            self.connection.close()

    def end(self) -> None:
        """Wait for the process to exit, or kill it."""
        if self._process is not None:
            self._process.join(EXIT_TIMEOUT_S)
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, config: EvalConfig, devices: str | None) -> None:
    """Run batches in a worker process until the owner closes the connection or dies."""
    # standard output is for the owner's tables; Ctrl-C reaches the whole process group, and the owner handles it
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if devices is not None:
        os.environ[DEVICES] = devices
    lock = threading.Lock()

    def emit(event: Event) -> None:
        with lock, suppress(OSError):  # the owner is gone, and the loop below ends
            connection.send(event)

    with EvalWorker(config) as worker:
        threads = ThreadPoolExecutor(BATCHES_PER_WORKER)
        with suppress(EOFError, OSError):
            while True:
                threads.submit(worker.run, connection.recv(), emit)
    os._exit(0)  # nobody needs the results of what is still running
