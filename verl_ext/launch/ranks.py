"""Runs the ranks of this node: torchrun in a thread, and the signals in the main thread."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from verl_ext.config.schema import to_yaml
from verl_ext.errors import first_line_of
from verl_ext.launch.keeper import Keeper
from verl_ext.launch.outcome import Failure, Outcome, RankFailure, Stopped, judge
from verl_ext.launch.torchrun import torchrun
from verl_ext.metrics.timing import startup
from verl_ext.processes import LAUNCHER_PID, StopSignals
from verl_ext.trainer.stages import RunConfig

RANK_MODULE = "verl_ext.trainer"


class RankThread(threading.Thread):
    """Calls torchrun, which handles signals itself in the main thread alone: it would kill the ranks after 30 s.

    The ranks ask the kernel to die with the thread that forked them, so it must live as long as they do; it does, as
    torchrun waits for them. It is a daemon, because torchrun cannot be called back while it waits for other nodes.

    Attributes:
        failures: rank to torch's record of its failure.
        problem: why torchrun itself failed.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(name="torchrun", daemon=True)
        self._run = run
        self.failures: Mapping[int, RankFailure] = {}
        self.problem: Exception | None = None

    def run(self) -> None:
        """Run the ranks to their end."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            self._run()
        except ChildFailedError as error:
            self.failures = error.failures
        except Exception as error:  # raised again in the main thread
            self.problem = error


def run_ranks(config: RunConfig, signals: StopSignals, module: str = RANK_MODULE) -> Outcome:
    """Run a module on every rank of this node until all are done.

    Args:
        config: the resolved configuration; handed to the ranks in a file.
        signals: what the launcher is asked.
        module: what every rank runs, as `python -m` takes it, with the file as its argument.

    Returns:
        None when every rank finished, else why they ended.

    Raises:
        StopRequest: the launcher was asked to stop before the ranks were started.
    """
    # An abandoned thread may still write into the directory.
    with tempfile.TemporaryDirectory(prefix="verl_ext_", ignore_cleanup_errors=True) as directory:
        path = Path(directory) / "config.yaml"
        with signals.raising():
            path.write_text(to_yaml(config))
            startup.mark("launcher")
            thread = RankThread(torchrun(config, module, Path(directory), [str(path)]))
            startup.save(Path(directory))
        keeper = Keeper(module, signals, config.trainer.preemption.grace_s)
        os.environ[LAUNCHER_PID] = str(os.getpid())
        thread.start()
        keeper.wait(thread)
    if thread.is_alive():  # no rank is left, and nobody can say how they ended
        return Stopped.by(keeper.request)
    if thread.problem is not None:
        failure = failed_to_meet(config.trainer.nnodes, thread.problem)
        return failure if keeper.request is None else Stopped.by(keeper.request)
    return judge(thread.failures, keeper.request)


def failed_to_meet(num_nodes: int, problem: Exception) -> Failure:
    """torchrun could not listen, or did not find the other nodes in time; any other exception of it is raised."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if not isinstance(problem, DistError | RendezvousError | TimeoutError):
        raise problem
    remedy = "; start the command on every node, with one MASTER_ADDR and a MASTER_PORT that is free there"
    why = f"torchrun could not bring the ranks together ({first_line_of(problem)})"
    return Failure(why + (remedy if num_nodes > 1 else ""), exit_code=1)
