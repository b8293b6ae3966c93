"""Calls torchrun inside this process, with a rendezvous that no other machine can reach.

Imports torch, so the launcher imports this module only when it starts the ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from verl_ext.hardware import DEVICE_ORDER, DEVICES, visible_gpus
from verl_ext.trainer.stages import STAGES, RunConfig

LOOPBACK = "loopback"
ADDRESS = "127.0.0.1"


def torchrun(config: RunConfig, module: str, directory: Path, arguments: list[str]) -> Callable[[], object]:
    """Prepare the start of the ranks.

    Args:
        module: module that every rank runs with `python -m`.
        directory: directory for torchrun's files; must outlive the ranks.
        arguments: arguments of the module.

    Returns:
        A function that runs the ranks of this node to their end, and raises torch's `ChildFailedError` if a rank fails.
        In a thread other than the main one it does not handle signals.
    """
    set_rank_environment(config)
    silence_torchrun()
    options = [*torchrun_options(config), f"--log-dir={directory}", "-m", module, *arguments]
    launch_config, command, words = config_from_args(parse_args(options))
    return lambda: elastic_launch(launch_config, entrypoint=command)(*words)


def silence_torchrun() -> None:
    """Suppress torchrun's own messages (pages on a failure, a warning in every thread); ours is one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def torchrun_options(config: RunConfig) -> list[str]:
    """Return command-line options for torchrun; several nodes meet at MASTER_ADDR:MASTER_PORT."""
    options = [f"--nproc-per-node={config.trainer.n_gpus_per_node}"]
    if config.trainer.nnodes == 1:
        # Instead of --standalone: a free port, so that several runs can share a machine.
        return [*options, f"--rdzv-backend={LOOPBACK}", f"--rdzv-id={uuid.uuid4()}"]
    return [
        *options,
        f"--nnodes={config.trainer.nnodes}",
        f"--node-rank={os.environ.get('NODE_RANK', '0')}",
        f"--master-addr={os.environ.get('MASTER_ADDR', '127.0.0.1')}",
        f"--master-port={os.environ.get('MASTER_PORT', '29500')}",
    ]


def set_rank_environment(config: RunConfig) -> None:
    """Set defaults that ranks inherit; variables that the user has set stay, except prefixes of GPU ids."""
    threads = max(1, len(os.sched_getaffinity(0)) // config.trainer.n_gpus_per_node)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VERL_LOGGING_LEVEL": "WARN",  # verl logs each file that each rank writes
        "TOKENIZERS_PARALLELISM": "true",
        "PYTHONUNBUFFERED": "1",
    }
    if config.trainer.nnodes == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # by default gloo listens on the address of the host name
    if config.eval.watch:
        defaults |= DEVICE_ORDER  # `require_free_gpus` compares GPUs of the ranks with `eval.devices` by nvidia-smi
    if STAGES[config.stage].command == "sft" and visible_gpus() and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # Steps have different lengths, which fragment fixed segments. The older variable has the same meaning.
        defaults["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "GPU-" in os.environ.get(DEVICES, ""):
        os.environ[DEVICES] = ",".join(visible_gpus())  # vLLM needs full ids


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of a single machine: a store on 127.0.0.1 that lives as long as this object.

    torchrun's own rendezvous pickles its state into a store that listens on every interface, so anyone who can connect
    to it can execute code here. On a single machine, only the store's port has to be agreed on.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        with socket.create_server((ADDRESS, 0)) as listener:
            self._port = listener.getsockname()[1]
            # Without a socket the store would listen on every interface; it closes the socket itself.
            self._store = TCPStore(
                ADDRESS, self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    @property
    def use_agent_store(self) -> bool:
        """The ranks are clients of this store."""
        return True

    def get_backend(self) -> str:
        return LOOPBACK

    def next_rendezvous(self) -> RendezvousInfo:
        """This node is the only one."""
        own = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """No other node can join."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """The store ends with this object."""
        return True


rendezvous_handler_registry.register(LOOPBACK, lambda parameters: LoopbackRendezvous(parameters.run_id))
