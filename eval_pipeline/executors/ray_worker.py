"""A worker on the Ray cluster, as the driver sees it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from eval_pipeline.config import EvalConfig
from eval_pipeline.executors.executor import BATCHES_PER_WORKER
from eval_pipeline.executors.ray_actor import WorkerActor
from eval_pipeline.executors.slots import Slot
from eval_pipeline.work.batch import Batch, Event, Lost
from verl_ext.paths import IMPORT_PATH


class RayWorker:
    """One actor, from the request for a place to its death.

    One call for events is always under way, which the actor answers at the first event. A streaming generator would
    make each event an object that can be lost by itself; a lost reply is the same as a lost actor.

    Args:
        recipe: of the evaluation.
        gpus: that the actor needs; 0 gives it a processor instead.

    Attributes:
        slot: what it has to do.
        is_ready: whether it has found a place and can be given batches.
        death: why it is no more; None while it may live.
    """

    def __init__(self, recipe: EvalConfig, gpus: int) -> None:
        # a checkout is on the file system that all nodes share; Ray fills in what the node has. A wheel is installed
        # in the environment of every node.
        path = {"env_vars": {"PYTHONPATH": f"{IMPORT_PATH}{os.pathsep}${{PYTHONPATH}}"}} if IMPORT_PATH else {}
        self._actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=0 if gpus else 1,
                num_gpus=gpus,
                max_concurrency=BATCHES_PER_WORKER + 2,  # and a call for events, and one to end
                scheduling_strategy="SPREAD",
                runtime_env=path,
            )
            .remote(recipe, _environment(recipe))
        )
        self._reply = self._actor.greet.remote().future()
        self._works: list[Future[Any]] = []
        self.slot = Slot()
        self.is_ready = False
        self.death: str | None = None

    def takes(self, export: Path | None) -> bool:
        """Whether a batch for this model can begin soon; a worker that waits for a place must not sit on batches."""
        return self.is_ready and self.slot.takes(export)

    def submit(self, batch: Batch) -> None:
        """Give it a batch."""
        self.slot.give(batch)
        self._works.append(self._actor.work.remote(batch).future())

    @property
    def awaited(self) -> list[Future[Any]]:
        """What to wait for; `receive` takes those that have come."""
        return [self._reply, *self._works]

    def receive(self, come: Sequence[Future[Any]]) -> list[Event]:
        """The events of the replies that have come; a dead worker's batches are lost."""
        events: list[Event] = []
        try:
            for reply in come:
                events += reply.result() or []
        except RayError as error:
            self._die(reason_of(error))
            reason = f"a worker on the Ray cluster died ({self.death})"
            return [*self.slot.forget_ended(events), *(Lost(batch, reason) for batch in self.slot.batches)]
        self._works = [work for work in self._works if work not in come]
        if self._reply in come:
            self.is_ready = True
            self._reply = self._actor.events.remote().future()
        return self.slot.forget_ended(events)

    def _die(self, reason: str) -> None:
        self.death = reason
        self.kill()  # of an actor that cannot be reached for the moment nothing is taken in any more

    def ask_to_end(self) -> Future[Any]:
        """Have it end its engine and its judge; returns what to wait for."""
        return self._actor.end.remote().future()

    def kill(self) -> None:
        """End it, or give up its request for a place."""
        ray.kill(self._actor)


def _environment(recipe: EvalConfig) -> dict[str, str]:
    """The server's key, as an argument: what stands in a `runtime_env` is written to Ray's logs."""
    name = recipe.engine.api_key_env
    return {name: os.environ[name]} if recipe.engine.kind == "openai" and name in os.environ else {}


def reason_of(error: RayError) -> str:
    """What is known of an actor's death, in one line."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"  # the first that is heard of most deaths
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if isinstance(error, ActorDiedError) and not error.actor_init_failed:
        return lines[min(1, len(lines) - 1)].split(". ")[0]  # the first line says only that it died
    return lines[-1]  # of a traceback
