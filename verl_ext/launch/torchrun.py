"""Calls torchrun inside this process.

Imports torch, so the launcher imports this module only when it starts the ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args

from verl_ext.hardware import DEVICE_ORDER, DEVICES, visible_gpus
from verl_ext.launch.rendezvous import CLUSTER, LOOPBACK
from verl_ext.trainer.stages import STAGES, RunConfig


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
    """Return command-line options for torchrun."""
    # Instead of --standalone: a free port, so that several runs can share a machine.
    backend = LOOPBACK if config.trainer.nnodes == 1 else CLUSTER
    return [
        f"--nproc-per-node={config.trainer.n_gpus_per_node}",
        f"--nnodes={config.trainer.nnodes}",
        f"--rdzv-backend={backend}",
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
