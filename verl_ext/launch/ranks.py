"""Starts the ranks with torchrun's own launcher and waits for them."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext.errors import USER_ERROR_EXIT_CODE


@dataclass(frozen=True)
class Failure:
    """Why the ranks ended.

    Attributes:
        message: a sentence for people.
        exit_code: of the rank that failed first; negative for a signal.
    """

    message: str
    exit_code: int

    @property
    def is_user_error(self) -> bool:
        """Whether a rank refused its input, rather than crashed."""
        return self.exit_code == USER_ERROR_EXIT_CODE


class StopRequest(Exception):
    """Somebody asked the launcher to stop; its ranks are gone.

    Attributes:
        signal: the signal that asked.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def run_ranks(config: DictConfig) -> Failure | None:
    """Run `verl_ext.trainer` on every rank of this node until all are done.

    Args:
        config: the resolved configuration; handed to the ranks in a file.

    Returns:
        None when every rank finished, else why the first one did not.

    Raises:
        StopRequest: SIGTERM, SIGINT or another signal that torchrun forwards.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    set_rank_environment(config.trainer.n_gpus_per_node)
    silence_torchrun()
    with tempfile.TemporaryDirectory(prefix="verl_ext_") as directory:
        path = Path(directory) / "config.yaml"
        OmegaConf.save(config, path)
        launch_config, command, arguments = config_from_args(parse_args([*torchrun_options(config), str(path)]))
        try:
            elastic_launch(launch_config, entrypoint=command)(*arguments)
        except ChildFailedError as error:
            return describe(error)
        except SignalException as error:
            raise StopRequest(error.sigval) from None
        except KeyboardInterrupt:
            raise StopRequest(signal.SIGINT) from None
    return None


def silence_torchrun() -> None:
    """Keep torchrun's own report of failures (pages of it) off the screen; the launcher says it in one sentence."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def torchrun_options(config: DictConfig) -> list[str]:
    """The options a user would give to torchrun; several nodes meet at MASTER_ADDR:MASTER_PORT."""
    options = [f"--nproc-per-node={config.trainer.n_gpus_per_node}"]
    if config.trainer.nnodes == 1:
        # What --standalone stands for; a free port, so that several runs share a machine.
        options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    else:
        options += [
            f"--nnodes={config.trainer.nnodes}",
            f"--node-rank={os.environ.get('NODE_RANK', '0')}",
            f"--master-addr={os.environ.get('MASTER_ADDR', '127.0.0.1')}",
            f"--master-port={os.environ.get('MASTER_PORT', '29500')}",
        ]
    return [*options, "-m", "verl_ext.trainer"]


def set_rank_environment(num_processes: int) -> None:
    """Defaults that ranks inherit; what the user has set stays."""
    threads = max(1, len(os.sched_getaffinity(0)) // num_processes)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VERL_LOGGING_LEVEL": "WARN",  # verl logs each file that each rank writes
        "TOKENIZERS_PARALLELISM": "true",
        "PYTHONUNBUFFERED": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def describe(error: object) -> Failure:
    """The rank that failed first, except that a rank which refused its input goes before those that it took along."""
    failures = error.failures  # rank to ProcessFailure
    refused = {rank: failure for rank, failure in failures.items() if failure.exitcode == USER_ERROR_EXIT_CODE}
    rank, first = min((refused or failures).items(), key=lambda item: (item[1].timestamp, item[0]))
    if refused and isinstance(first.message, str):
        return Failure(first.message, first.exitcode)
    how = f"was killed by {first.signal_name()}" if first.exitcode < 0 else f"failed with exit code {first.exitcode}"
    return Failure(f"rank {rank} (process {first.pid}) {how}", first.exitcode)
