"""A worker as a Ray actor; this is what runs on the cluster's nodes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from queue import Empty, SimpleQueue

from eval_pipeline.config import EvalConfig
from eval_pipeline.work.batch import Batch, Event, Failed
from eval_pipeline.work.worker import Worker
from verl_ext.errors import UserError


class WorkerActor:
    """A worker whose events are fetched. Ray calls its methods from several threads at a time.

    Args:
        recipe: of the evaluation.
        environment: variables that the driver has and the node lacks.
    """

    def __init__(self, recipe: EvalConfig, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._stack = ExitStack()
        self._worker: Worker | None = None
        self._refusal = ""
        try:
            self._worker = self._stack.enter_context(Worker(recipe))
        except UserError as error:  # no judge can work here
            self._refusal = str(error)

    def greet(self) -> list[Event]:
        """No events; an answer means that the worker has found its place and works."""
        return []

    def work(self, batch: Batch) -> None:
        """Do a batch; what comes of it is among the events."""
        if self._worker is None:
            self._events.put(Failed(batch.id, self._refusal))
        else:
            self._worker.work(batch, self._events.put)

    def events(self) -> list[Event]:
        """Wait for the first event; returns all that there are by then."""
        events = [self._events.get()]
        try:
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            return events

    def end(self) -> None:
        """End the engine and the judge."""
        self._stack.close()
