"""Workers as actors of a Ray cluster."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

# Read by Ray at import. By default, a node's death prints pages to standard output despite `log_to_driver=False`.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

from eval_pipeline.config import EngineConfig, EvalConfig
from eval_pipeline.pool import BATCHES_PER_WORKER, EXIT_TIMEOUT_S, PoolWorker, WorkerPool, share_cores
from eval_pipeline.worker import Batch, EvalWorker, Event
from verl_ext.console import warn
from verl_ext.errors import UserError, first_line_of
from verl_ext.paths import IMPORT_PATH

SCALE_S = 2.0
"""How often the pool adapts to the nodes of the cluster and replaces dead workers."""
PATIENCE_S = 60.0
"""How long a worker may wait for resources before the user is warned."""
MAX_FAILED_STARTS = 3
"""After this many consecutive workers have died before they were ready, the cluster counts as broken."""
CONNECT_TIMEOUT_S = 10.0
"""How long the head of the cluster may take to accept a connection."""


class RayPool(WorkerPool):
    """Actors of a Ray cluster. A dead one is replaced; with `num_workers=null`, new nodes are used too."""

    def __init__(self, config: EvalConfig) -> None:
        super().__init__()
        self._config = config
        self._stack = ExitStack()
        self._workers: list[RayWorker] = []
        self._gpus = 0
        self._scaled_at = float("-inf")
        self._complete_at = time.monotonic()
        self._has_warned = False
        self._num_failed_starts = 0

    def __enter__(self) -> RayPool:
        with ExitStack() as stack:
            stack.enter_context(connected(self._config.executor.address))
            stack.callback(self._end_workers)
            self._gpus = gpus_per_worker(self._config.engine)
            self._scale()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end_workers(self) -> None:
        wait([worker.end() for worker in self._workers if worker.is_ready], EXIT_TIMEOUT_S)
        for worker in self._workers:
            worker.kill()

    def events(self, timeout_s: float) -> list[Event]:
        if time.monotonic() - self._scaled_at >= SCALE_S:
            self._scale()
        replies = [reply for worker in self._workers for reply in worker.replies]
        if not replies:
            time.sleep(timeout_s)
            return []
        # not `ray.wait`, which turns the exception of a signal handler into a SystemError
        wait(replies, timeout_s, FIRST_COMPLETED)
        return [event for worker in list(self._workers) for event in self._receive(worker)]

    def _receive(self, worker: RayWorker) -> list[Event]:
        """The events of a worker; a dead one is dropped.

        Raises:
            UserError: no worker can start.
        """
        if not any(reply.done() for reply in worker.replies):
            return []
        was_ready = worker.is_ready
        events = worker.receive()
        if worker.death is None:
            self._num_failed_starts = 0
            return events
        self._workers.remove(worker)
        if was_ready:  # its replacement may start
            return events
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS and not any(other.is_ready for other in self._workers):
            raise UserError(
                f"no worker can start on the Ray cluster ({worker.death}); see `ray status` and the nodes' logs"
            )
        return events

    def _scale(self) -> None:
        """Start or end workers until the wanted number is reached."""
        self._scaled_at = time.monotonic()
        size = self._config.engine.tensor_parallel_size
        if self._config.engine.kind == "vllm" and not self._gpus and capacity(size):
            self._gpus = size  # nodes with GPUs have joined the cluster
        wanted = self._config.executor.num_workers or capacity(self._gpus)
        for worker in self._workers:
            worker.is_retiring = worker.gpus != self._gpus
        current = [worker for worker in self._workers if not worker.is_retiring]
        idle = sorted((each for each in current if not each.batches), key=lambda each: each.is_ready)
        surplus = idle[: max(0, len(current) - wanted)]  # a node is gone; waiting workers are ended first
        for worker in [*surplus, *(each for each in self._workers if each.is_retiring and not each.batches)]:
            worker.kill()
            self._workers.remove(worker)
        for _ in range(wanted - len(current)):
            self._workers.append(RayWorker(self._config, self._gpus))
        self._warn_of_waiting()

    def _warn_of_waiting(self) -> None:
        """Warn once if workers wait for resources, possibly forever."""
        num_waiting = sum(not worker.is_ready for worker in self._workers)
        if self._workers and not num_waiting:
            self._complete_at = time.monotonic()
        elif time.monotonic() - self._complete_at > PATIENCE_S and not self._has_warned:
            self._has_warned = True
            who = f"{num_waiting} of {len(self._workers)} workers" if self._workers else "workers"
            need = f"{self._gpus} free GPUs on one node" if self._gpus else "a free CPU"
            or_fewer = " or lower executor.num_workers" if (self._config.executor.num_workers or 1) > 1 else ""
            warn(
                f"{who} have waited {PATIENCE_S:.0f} s for resources of the Ray cluster (each needs {need}); add nodes"
                f"{or_fewer}"
            )


class RayWorker(PoolWorker):
    """An actor, from the request for its resources to its death.

    One call of `WorkerActor.events` is always in progress and returns with the next events. With a streaming generator,
    each event would be an object that can be lost on its own, whereas a lost reply means a lost actor.

    Args:
        gpus: number of GPUs of the actor; with 0, it gets a CPU instead.

    Attributes:
        gpus: number of GPUs of the actor.
        is_ready: whether the actor has its resources and can get batches.
        is_retiring: whether the actor gets no further batches, because it lacks the GPUs that the cluster now has.
        death: why the actor died; None while it is alive.
    """

    def __init__(self, config: EvalConfig, gpus: int) -> None:
        super().__init__()
        self.gpus = gpus
        # A checkout is on a file system that all nodes share; Ray fills in the node's PYTHONPATH. A wheel is installed
        # in the environment of every node.
        path = {"env_vars": {"PYTHONPATH": f"{IMPORT_PATH}{os.pathsep}${{PYTHONPATH}}"}} if IMPORT_PATH else {}
        self._actor = (
            ray.remote(WorkerActor)
            .options(
                num_cpus=0 if gpus else 1,
                num_gpus=gpus,
                max_concurrency=BATCHES_PER_WORKER + 2,  # plus one call of `events` and one of `end`
                scheduling_strategy="SPREAD",
                runtime_env=path,
            )
            .remote(config, _environment(config), gpus)
        )
        self._events: Future[list[Event]] = self._actor.ping.remote().future()
        self._runs: list[Future[Any]] = []
        self.is_ready = self.is_retiring = False
        self.death: str | None = None

    def has_room_for(self, export: Path | None) -> bool:
        """False until the worker has its resources, so that it holds no batches before, and while it is retiring."""
        return self.is_ready and not self.is_retiring and super().has_room_for(export)

    @property
    def replies(self) -> list[Future[Any]]:
        """The calls in progress."""
        return [self._events, *self._runs]

    def _send(self, batch: Batch) -> None:
        self._runs.append(self._actor.run.remote(batch).future())

    def _drain(self) -> tuple[list[Event], str | None]:
        events: list[Event] = []
        done = [reply for reply in self.replies if reply.done()]
        try:
            for reply in done:
                events += reply.result() or []
        except RayError as error:
            self.death = describe_death(error)
            self.kill()  # accept nothing more from an actor that is unreachable only for a while
            return events, f"a worker on the Ray cluster died ({self.death})"
        self._runs = [run for run in self._runs if run not in done]
        if self._events in done:
            self.is_ready = True
            self._events = self._actor.events.remote().future()
        return events, None

    def end(self) -> Future[Any]:
        """Ask the actor to end its engine and its judge; returns a future of its reply."""
        return self._actor.end.remote().future()

    def kill(self) -> None:
        """Kill the actor, or withdraw its request for resources."""
        ray.kill(self._actor)


class WorkerActor:
    """A worker on a cluster node. The pool polls its events, and Ray calls its methods from several threads.

    Args:
        environment: variables that the node may lack.
        gpus: number of GPUs of this worker.
    """

    def __init__(self, config: EvalConfig, environment: Mapping[str, str], gpus: int) -> None:
        os.environ.update(environment)
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._worker = EvalWorker(share_cores(config, _workers_on_this_node(config.executor.num_workers, gpus)))

    def ping(self) -> list[Event]:
        """Return an empty list. The reply means that the actor has its resources."""
        return []

    def run(self, batch: Batch) -> None:
        """Run a batch."""
        self._worker.run(batch, self._events.put)

    def events(self) -> list[Event]:
        """Wait for an event; returns all that have arrived."""
        events = [self._events.get()]
        try:
            while True:
                events.append(self._events.get_nowait())
        except Empty:
            return events

    def end(self) -> None:
        """End the engine and the judge."""
        self._worker.__exit__(None, None, None)


def _environment(config: EvalConfig) -> dict[str, str]:
    """The server's key, which must not be in a `runtime_env`: Ray logs it."""
    name = config.engine.api_key_env
    return {name: os.environ[name]} if config.engine.kind == "openai" and name in os.environ else {}


def _workers_on_this_node(num_workers: int | None, gpus: int) -> int:
    """How many workers share the node of the calling actor, if Ray spreads them evenly."""
    own_id = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    room = _count(nodes[own_id], "GPU") // gpus if gpus else 1
    if num_workers is None:
        return max(1, room)
    even = math.ceil(num_workers / sum(_count(node, "GPU" if gpus else "CPU") > 0 for node in nodes.values()))
    return max(1, min(room, even) if gpus else even)


def describe_death(error: RayError) -> str:
    """Why an actor died, in one line."""
    if isinstance(error, ActorUnavailableError):
        return "it cannot be reached"  # the first error after most deaths
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if isinstance(error, ActorDiedError) and not error.actor_init_failed:
        return lines[min(1, len(lines) - 1)].split(". ")[0]  # the first line only says that it died
    return lines[-1]  # the end of a traceback


# The cluster


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Connect to a Ray cluster during the block.

    Args:
        address: address of the cluster's head. None uses `RAY_ADDRESS`, or else a cluster on this machine. `local`
            starts one that ends with the block.

    Raises:
        UserError: there is no such cluster.
    """
    handler = signal.getsignal(signal.SIGTERM)  # Ray replaces it
    try:
        _connect(address or os.environ.get("RAY_ADDRESS") or "auto")
    finally:
        signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    if "://" in address:
        raise UserError(
            f"executor.address={address} is a Ray Client address; run the command on a cluster node, and "
            "specify host:port"
        )
    try:
        if address != "local":
            # Ray itself takes two minutes to report that nobody listens
            host, port = canonicalize_bootstrap_address(address).rsplit(":", 1)
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster can be reached at executor.address={address} ({first_line_of(error)}); start one with "
            "`ray start --head`, or set executor.address to the host:port of a cluster that this machine belongs to"
        ) from error


def gpus_per_worker(engine: EngineConfig) -> int:
    """How many of the cluster's GPUs a worker needs; 0 on CPUs or with a server.

    Raises:
        UserError: no node has enough GPUs.
    """
    max_gpus = max((_count(node, "GPU") for node in _nodes()), default=0)
    if engine.kind != "vllm" or not max_gpus:
        return 0
    if engine.tensor_parallel_size > max_gpus:
        raise UserError(
            f"engine.tensor_parallel_size={engine.tensor_parallel_size} needs that many GPUs in one node, but no node "
            f"of the Ray cluster has more than {max_gpus}; lower it"
        )
    return engine.tensor_parallel_size


def capacity(gpus: int) -> int:
    """How many workers the cluster has room for: as many as its GPUs allow, or one per node."""
    if gpus:
        return sum(_count(node, "GPU") // gpus for node in _nodes())
    return sum(_count(node, "CPU") > 0 for node in _nodes())


def _nodes() -> list[dict[str, float]]:
    """Resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _count(node: dict[str, float], kind: str) -> int:
    return int(node.get(kind, 0))
