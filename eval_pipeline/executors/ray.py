"""Workers as actors of a Ray cluster, each with its GPUs where there are some."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from eval_pipeline.config import EvalConfig
from eval_pipeline.executors.executor import Executor
from eval_pipeline.executors.ray_cluster import capacity, connected, gpus_per_worker
from eval_pipeline.executors.ray_worker import RayWorker
from eval_pipeline.work.batch import Batch, Event
from verl_ext.console import warn
from verl_ext.errors import UserError

LOOK_S = 2.0
"""How often the cluster is asked what nodes it has, and dead workers are replaced."""
PATIENCE_S = 60.0
"""How long a worker may wait for a place before the user is told."""
END_S = 30.0
"""How long the workers may take to end their engines and judges before they are killed."""
MAX_FAILED_STARTS = 3
"""Workers that may die one after the other before they can work; then there is something wrong with the cluster."""


class RayExecutor(Executor):
    """Actors of a Ray cluster; one that died is replaced, and with `num_workers=null` nodes that come are used too.

    Args:
        recipe: says which cluster, how many workers, and what they do.
    """

    def __init__(self, recipe: EvalConfig) -> None:
        self._recipe = recipe
        self._stack = ExitStack()
        self._workers: list[RayWorker] = []
        self._gpus = 0
        self._looked = float("-inf")
        self._complete_at = time.monotonic()
        self._has_warned_of_places = False
        self._num_failed_starts = 0

    def __enter__(self) -> RayExecutor:
        with ExitStack() as stack:
            stack.enter_context(connected(self._recipe.executor.address))
            stack.callback(self._end_workers)
            self._gpus = gpus_per_worker(self._recipe.engine)
            self._look()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _end_workers(self) -> None:
        wait([worker.ask_to_end() for worker in self._workers if worker.is_ready], END_S)
        for worker in self._workers:
            worker.kill()

    def has_room_for(self, export: Path | None) -> bool:
        """See `Executor`."""
        return any(worker.takes(export) for worker in self._workers)

    def submit(self, batch: Batch) -> None:
        """See `Executor`."""
        free = [worker for worker in self._workers if worker.takes(batch.export)]
        min(free, key=lambda worker: worker.slot.cost(batch.export)).submit(batch)

    def events(self, timeout_s: float) -> list[Event]:
        """See `Executor`.

        Raises:
            UserError: no worker can start on the cluster.
        """
        if time.monotonic() - self._looked >= LOOK_S:
            self._look()
        awaited = [reply for worker in self._workers for reply in worker.awaited]
        if not awaited:
            time.sleep(timeout_s)
            return []
        # not `ray.wait`: it turns the exception of a signal's handler into a SystemError
        return self._receive(wait(awaited, timeout_s, FIRST_COMPLETED).done)

    def _receive(self, come: set[Future[Any]]) -> list[Event]:
        events: list[Event] = []
        for worker in list(self._workers):
            if its := [reply for reply in worker.awaited if reply in come]:
                was_ready = worker.is_ready
                events += worker.receive(its)
                self._note(worker, was_ready)
        return events

    def _note(self, worker: RayWorker, was_ready: bool) -> None:
        """Drop a dead worker, and give up where none can start."""
        if worker.death is None:
            self._num_failed_starts = 0
            return
        self._workers.remove(worker)
        if was_ready:
            warn(f"a worker on the Ray cluster died ({worker.death}); its work is repeated")
            return
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS and not any(other.is_ready for other in self._workers):
            raise UserError(f"no worker can start on the Ray cluster ({worker.death}); fix its nodes")

    def _look(self) -> None:
        """Bring the number of workers to what is wanted."""
        self._looked = time.monotonic()
        wanted = self._recipe.executor.num_workers or capacity(self._gpus)
        idle = sorted((each for each in self._workers if not each.slot.batches), key=lambda each: each.is_ready)
        for worker in idle[: max(0, len(self._workers) - wanted)]:  # a node has gone, those without a place go first
            worker.kill()
            self._workers.remove(worker)
        while len(self._workers) < wanted:
            self._workers.append(RayWorker(self._recipe, self._gpus))
        self._warn_of_waiting()

    def _warn_of_waiting(self) -> None:
        """Say once that there is no room, which may be for ever."""
        num_waiting = sum(not worker.is_ready for worker in self._workers)
        if self._workers and not num_waiting:
            self._complete_at = time.monotonic()
        elif time.monotonic() - self._complete_at > PATIENCE_S and not self._has_warned_of_places:
            self._has_warned_of_places = True
            who = f"{num_waiting} of {len(self._workers)} workers" if self._workers else "workers"
            need = f"{self._gpus} free GPUs on one node" if self._gpus else "a free CPU"
            warn(f"{who} have waited {PATIENCE_S:.0f} s for resources of the Ray cluster; each needs {need}")
