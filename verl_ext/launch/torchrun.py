"""torchrun's own launcher as a call inside this process."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from verl_ext.processes import defer_gc
from verl_ext.trainer.stages import RunConfig


def torchrun(config: RunConfig, module: str, directory: Path, arguments: list[str]) -> Callable[[], object]:
    """Prepare everything up to the start of the ranks; imports torch, which takes seconds.

    Args:
        config: the resolved configuration.
        module: what every rank runs, as `python -m` takes it.
        directory: for torchrun's files; must outlive the ranks.
        arguments: of the module.

    Returns:
        A function that runs the ranks of this node to their end. In a thread other than the main one it leaves the
        signals alone. It raises torch's `ChildFailedError` when a rank fails.
    """
    with defer_gc():
        from torch.distributed.launcher.api import elastic_launch
        from torch.distributed.run import config_from_args, parse_args

        import verl_ext.launch.rendezvous  # noqa: F401 - makes its name known to torchrun

    set_rank_environment(config.trainer.n_gpus_per_node, config.trainer.nnodes)
    silence_torchrun()
    options = [*torchrun_options(config), f"--log-dir={directory}", "-m", module, *arguments]
    launch_config, command, words = config_from_args(parse_args(options))
    return lambda: elastic_launch(launch_config, entrypoint=command)(*words)


def silence_torchrun() -> None:
    """Keep torchrun's own words (pages on a failure, a warning in every thread) off the screen; ours is a sentence."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def torchrun_options(config: RunConfig) -> list[str]:
    """The options a user would give to torchrun; several nodes meet at MASTER_ADDR:MASTER_PORT."""
    options = [f"--nproc-per-node={config.trainer.n_gpus_per_node}"]
    if config.trainer.nnodes == 1:
        # In the place of what --standalone stands for; a free port, so that several runs share a machine.
        return [*options, "--rdzv-backend=loopback", f"--rdzv-id={uuid.uuid4()}"]
    return [
        *options,
        f"--nnodes={config.trainer.nnodes}",
        f"--node-rank={os.environ.get('NODE_RANK', '0')}",
        f"--master-addr={os.environ.get('MASTER_ADDR', '127.0.0.1')}",
        f"--master-port={os.environ.get('MASTER_PORT', '29500')}",
    ]


def set_rank_environment(num_processes: int, num_nodes: int) -> None:
    """Defaults that ranks inherit; what the user has set stays."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VERL_LOGGING_LEVEL": "WARN",  # verl logs each file that each rank writes
        "TOKENIZERS_PARALLELISM": "true",
        "PYTHONUNBUFFERED": "1",
    }
    if num_nodes == 1:
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would listen on the address that the host's name stands for
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
