"""The Ray cluster: the connection to it, and how many workers it has room for."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

# read when Ray is imported: of a node that died it prints pages to standard output, also with `log_to_driver=False`
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
import ray
from ray._private.services import canonicalize_bootstrap_address

from eval_pipeline.config import EngineConfig
from verl_ext.errors import UserError, first_line_of

PROBE_S = 10.0
"""How long a cluster's head may take to accept a connection."""


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """Within the block this process is a driver of a Ray cluster.

    Args:
        address: of the cluster's head; None takes `RAY_ADDRESS`, else a cluster that runs on this machine; `local`
            starts one that ends with the block.

    Raises:
        UserError: there is no such cluster.
    """
    # Ray takes SIGTERM for itself, which the command wants to hear
    on_terminate = signal.getsignal(signal.SIGTERM)
    try:
        _connect(address or os.environ.get("RAY_ADDRESS") or "auto")
    finally:
        signal.signal(signal.SIGTERM, on_terminate)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    if "://" in address:
        raise UserError(
            f"executor.address={address} is a Ray Client address; run the command on a cluster node and give host:port"
        )
    try:
        if address != "local":
            _require_listener(canonicalize_bootstrap_address(address))
        ray.init(address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"no Ray cluster can be reached at executor.address={address} ({first_line_of(error)}); start one with "
            "`ray start --head`, or set executor.address to the host:port of a cluster that this machine belongs to"
        ) from error


def _require_listener(address: str) -> None:
    """Raise `OSError` where nobody listens: Ray itself takes two minutes to say so."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()


def gpus_per_worker(engine: EngineConfig) -> int:
    """How many of the cluster's GPUs a worker needs; 0 where it runs on a CPU or asks a server.

    Raises:
        UserError: no node has so many.
    """
    most = max((_number_of("GPU", node) for node in _nodes()), default=0)
    if engine.kind != "vllm" or not most:
        return 0
    if engine.tensor_parallel_size > most:
        raise UserError(
            f"engine.tensor_parallel_size={engine.tensor_parallel_size} needs that many GPUs in one node, but no node "
            f"of the Ray cluster has more than {most}; lower it"
        )
    return engine.tensor_parallel_size


def capacity(gpus: int) -> int:
    """How many workers the cluster has room for now: as many as its GPUs allow, or one on each node.

    Args:
        gpus: of each worker.
    """
    if gpus:
        return sum(_number_of("GPU", node) // gpus for node in _nodes())
    return sum(_number_of("CPU", node) > 0 for node in _nodes())


def _nodes() -> list[dict[str, float]]:
    """Resources of each node that is alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _number_of(kind: str, node: dict[str, float]) -> int:
    return int(node.get(kind, 0))
