"""Runs the ranks of this node: torchrun in a thread, signal handling in the main thread."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil

from verl_ext.config.schema import to_yaml
from verl_ext.console import print_line
from verl_ext.errors import first_line_of
from verl_ext.files import temporary_directory, temporary_errors
from verl_ext.launch.outcome import (
    Failure,
    HandledStop,
    NodeEndedError,
    Outcome,
    Stopped,
    classify_outcome,
    is_known_to_all,
)
from verl_ext.metrics.timing import startup
from verl_ext.processes import LAUNCHER_PID, StopSignals, defer_gc, hold_stop_signals
from verl_ext.trainer.stages import RunConfig

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

RANK_MODULE = "verl_ext.trainer"
"""Module that every rank runs with `python -m`, with the file of its configuration as the argument."""
POLL_S = 0.1
LEAVE_AFTER_S = 10.0
"""Time for torchrun to notice that the ranks have ended; it may also wait for nodes that never come."""


def run_ranks(config: RunConfig, signals: StopSignals) -> Outcome:
    """Run `RANK_MODULE` on every rank of this node until all have ended.

    Args:
        config: the resolved configuration, which the ranks read from a file.

    Raises:
        UserError: the temporary directory cannot be written.
        StopRequest: a stop signal came before the ranks were started.
    """
    with temporary_directory() as directory:
        path = directory / "config.yaml"
        with signals.raising():
            with temporary_errors():
                path.write_text(to_yaml(config))
            startup.mark("launcher")
            with defer_gc(), hold_stop_signals():
                from verl_ext.launch.torchrun import torchrun
            thread = RankThread(torchrun(config, RANK_MODULE, directory, [str(path)]))
            with temporary_errors():
                startup.save(directory)
        supervisor = RankSupervisor(RANK_MODULE, signals, config.trainer.preemption.grace_s)
        os.environ[LAUNCHER_PID] = str(os.getpid())
        thread.start()
        supervisor.wait(thread)
    failures = {} if thread.is_alive() else thread.failures
    outcome: Outcome
    if thread.is_alive():  # no rank is left, and torchrun has not noticed how they ended
        outcome = Stopped.by(supervisor.request)
    elif thread.error is not None:
        outcome = outcome_of_error(config.trainer.nnodes, thread.error)
        if supervisor.request is not None:
            outcome = Stopped.by(supervisor.request)
    else:
        outcome = classify_outcome(failures, supervisor.request)
    if not is_known_to_all(outcome, [failure.exitcode for failure in failures.values()]):
        tell_other_nodes(config, outcome)
    return outcome


def tell_other_nodes(config: RunConfig, outcome: Outcome) -> None:
    """End the ranks of the other nodes, which would wait for those of this node."""
    if config.trainer.nnodes > 1 and outcome is not None:
        from verl_ext.launch.rendezvous import cluster_rendezvous

        cluster_rendezvous(config.trainer.nnodes).announce(outcome)


class RankThread(threading.Thread):
    """Runs torchrun, which would handle signals itself in the main thread and kill the ranks after 30 s.

    The kernel kills the ranks when the thread that forked them ends, so this thread waits for them. It is a daemon
    because torchrun cannot be interrupted while it waits for other nodes.

    Attributes:
        failures: torch's record of each rank that failed.
        error: error of torchrun itself.
    """

    def __init__(self, run: Callable[[], object]) -> None:
        super().__init__(name="torchrun", daemon=True)
        self._run = run
        self.failures: Mapping[int, ProcessFailure] = {}
        self.error: Exception | None = None

    def run(self) -> None:
        """Run the ranks to their end."""
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            self._run()
        except ChildFailedError as error:
            self.failures = error.failures
        except Exception as error:  # raised again in the main thread
            self.error = error


class RankSupervisor:
    """Waits for the ranks of this node, forwards stop signals to them, and kills those that exceed their time to save.

    Args:
        module: module that the ranks run; distinguishes them from other child processes.
        grace_s: seconds in which the ranks must save.

    Attributes:
        request: the stop request and how it was handled; None if there was none.
    """

    def __init__(self, module: str, signals: StopSignals, grace_s: float) -> None:
        self.request: HandledStop | None = None
        self._module, self._signals, self._grace_s = module, signals, grace_s
        self._signaled: set[int] = set()  # process ids
        self._kill_at = self._leave_at = math.inf  # by time.monotonic

    def wait(self, thread: threading.Thread) -> None:
        """Wait until the thread ends, or until it hangs although no rank is left."""
        while thread.is_alive() and time.monotonic() < self._leave_at:
            thread.join(POLL_S)
            if self._signals.received and thread.is_alive():
                self._handle_request()
        if self._signals.received and self.request is None:  # the ranks received the signal, too, and ended first
            self.request = HandledStop(self._signals.received[0], self._signals.immediate)

    def _handle_request(self) -> None:
        immediate = self._signals.immediate
        if self.request is None:
            self.request = HandledStop(self._signals.received[0])
            if immediate is None:
                self._forward(self.request.signal)
        if immediate is not None and self.request.immediate is None and not self.request.was_too_slow:
            self.request = replace(self.request, immediate=immediate)
            self._kill_at = time.monotonic()
            if not find_ranks(self._module):
                self._leave_at = self._kill_at
        self._kill_overdue_ranks()

    def _forward(self, number: signal.Signals) -> None:
        for rank in find_ranks(self._module):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself
                rank.send_signal(number)
            self._signaled.add(rank.pid)
        self._kill_at = time.monotonic() + (self._grace_s if self._signaled else 0)
        saving = f"saving after the current step, within {self._grace_s:g} s"
        waiting = f"no rank is running, exiting within {LEAVE_AFTER_S:g} s"
        quits = "SIGKILL" if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN else "SIGQUIT"  # ignored behind `&`
        again = "press Ctrl-C again" if number is signal.SIGINT else f"send {quits}"
        print_line(f"{number.name}: {saving if self._signaled else waiting}; {again} to stop immediately")

    def _kill_overdue_ranks(self) -> None:
        assert self.request is not None
        is_time = time.monotonic() >= self._kill_at
        for rank in find_ranks(self._module):
            is_new = rank.pid not in self._signaled  # started after the request: nothing to save, maybe no handler
            if is_new or is_time:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.killpg(rank.pid, signal.SIGKILL)  # torchrun gives each rank its own process group
                was_too_slow = self.request.was_too_slow or (not is_new and self.request.immediate is None)
                self.request = replace(self.request, killed=True, was_too_slow=was_too_slow)
        if is_time:
            self._leave_at = min(self._leave_at, time.monotonic() + LEAVE_AFTER_S)


def find_ranks(module: str) -> list[psutil.Process]:
    """The living children of this process that run `python -m module`."""
    ranks = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            if module in child.cmdline():
                ranks.append(child)
    return ranks


def outcome_of_error(num_nodes: int, error: Exception) -> Failure | Stopped:
    """Describe why torchrun could not listen, or did not find or lost another node; raise any other exception."""
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous import RendezvousError

    if isinstance(error, NodeEndedError):
        return error.outcome
    if not isinstance(error, DistError | RendezvousError | TimeoutError):
        raise error
    remedy = "; start the command on every node, with one MASTER_ADDR and a MASTER_PORT that is free there"
    why = f"torchrun could not bring the ranks together ({first_line_of(error)})"
    return Failure(why + (remedy if num_nodes > 1 else ""), exit_code=1)
