"""Evaluation during training: `eval.watch=true` runs `python -m eval_pipeline watch`, which dies with the launcher."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from verl_ext.checkpoint.retention import read_best_file
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_next, typed_path, warn
from verl_ext.errors import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError
from verl_ext.files import write_errors
from verl_ext.hardware import DEVICE_ORDER, DEVICES
from verl_ext.launch.outcome import run_with_restarts
from verl_ext.launch.report import next_after_evaluation, with_recipe
from verl_ext.metrics.run_record import RUN_FILE, load_run
from verl_ext.processes import StopRequest, StopSignals, end_with_parent
from verl_ext.trainer.stages import RunConfig

LOG = Path("eval", "watch.log")
LAST_BYTES = 4096
POLL_S = 0.1
STOP_S = 30.0
"""Time for the process to shut down its engine when training ends early."""
SOME_FAILED = 1
"""Exit code of a process that watched the run to its end but could not evaluate everything."""
RESTARTS = 3
"""Number of restarts after crashes without an evaluated checkpoint in between."""


class EvalWatcher:
    """Evaluates the checkpoints of a run until all are evaluated; restarts the evaluation if it crashes.

    Args:
        config: configuration of the run; `eval.devices` are the GPUs that training leaves free.

    Raises:
        UserError: its log cannot be written.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._run_dir = config.trainer.run_dir.absolute()
        self._environment = evaluation_environment(config)  # before the launcher sets variables for the ranks
        self._log_path = self._run_dir / LOG
        with write_errors(self._log_path):
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(self._log_path, "ab")
        self._exit_code = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # so that no process starts after `stop`
        # The kernel ends the process when the thread that forked it ends, so this thread waits for it.
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def finish(self, signals: StopSignals) -> int:
        """Wait until every checkpoint of the finished run is evaluated, or until a stop signal.

        Returns:
            The exit code of the command: nonzero after a stop, otherwise 0, because training itself is finished.
        """
        if self._thread.is_alive():
            log = typed_path(self._log_path)
            print_line(f"Waiting for the evaluation of every checkpoint; {log} shows the progress.")
        try:
            with signals.raising():
                while self._thread.is_alive():
                    self._thread.join(POLL_S)
        except StopRequest as stop:
            stop.handled = True
            print_line(f"Stopped by {stop.signal.name} while evaluating; the same command resumes the evaluation.")
            return stop.exit_code
        if self._exit_code:
            self._report_failure()
        else:
            best, _ = read_best_file(self._run_dir)
            results = typed_path(self._log_path.parent)
            print_line(
                f"Evaluation finished: results are in {results}" + (f", the best is {best.name}" if best else "")
            )
            print_next(next_after_evaluation(self._config))
        return 0

    def stop(self, signals: StopSignals) -> None:
        """End the process, at once if an immediate stop is requested; the next start resumes its work."""
        with self._lock:
            self._stopping.set()
        self._send(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < deadline and signals.immediate is None:
            self._thread.join(POLL_S)
        self._send(signal.SIGKILL)
        self._thread.join()
        self._log.close()

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # does nothing if it has ended

    def _run(self) -> None:
        self._exit_code = run_with_restarts(
            self._run_once,
            may_restart=lambda code: not self._stopping.is_set() and is_worth_restart(code, self._is_finished()),
            progress=lambda: len(list(self._run_dir.glob("eval/eval_step_*/metrics.json"))),
            announce=lambda code, plan: self._warn(code, f"{plan}; see {typed_path(self._log_path)}"),
            pause=self._stopping.wait,
            restarts=RESTARTS,
        )
        if self._exit_code and not self._stopping.is_set() and not self._is_finished():  # else `finish` reports it
            resume = shlex.join(with_recipe(self._config, "watch", typed_path(self._run_dir)))
            self._warn(
                self._exit_code,
                f"training continues without it ({self._last_line()}); see {typed_path(self._log_path)}, and resume "
                f"it with `{resume}`",
            )

    def _run_once(self) -> int:
        """Run the process to its end; returns its exit code, 1 if it cannot be started, 0 after `stop`."""
        command = [sys.executable, "-m", "eval_pipeline", "watch", str(self._run_dir)]
        command.append(f"--recipe={self._config.eval.recipe_name}")  # one word, even if the name starts with a dash
        with self._lock:
            if self._stopping.is_set():
                return 0
            try:
                self._process = subprocess.Popen(
                    command,
                    env=self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,  # Ctrl-C goes to the launcher, which then stops this process
                    # no evaluation may survive a launcher that is killed by SIGKILL
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),
                )
            except OSError as error:
                warn(f"the evaluation cannot start ({error.strerror}); training continues")
                return 1
        return self._process.wait()

    def _report_failure(self) -> None:
        """Tell the user that evaluations of the finished run are missing, and how to find out why and retry."""
        run_dir = typed_path(self._run_dir)
        if self._exit_code == SOME_FAILED:
            reason = "some of its evaluations failed, or it found no checkpoint to evaluate"
            then = [[*typed_command("eval"), command, run_dir] for command in ("status", "retry")]
        else:
            reason, then = self._last_line().removeprefix("error: "), []
        print_line(
            f"error: training finished, but the evaluation {how_it_ended(self._exit_code)} ({reason}); see "
            f"{typed_path(self._log_path)}",
            sys.stderr,
        )
        print_next([*then, with_recipe(self._config, "watch", run_dir)])

    def _warn(self, exit_code: int, consequence: str) -> None:
        warn(f"the evaluation during training {how_it_ended(exit_code)}; {consequence}")

    def _last_line(self) -> str:
        with open(self._log_path, "rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "its log is empty"

    def _is_finished(self) -> bool:
        try:
            return load_run(self._run_dir / RUN_FILE)["status"] == "finished"
        except UserError:
            return False  # the writer of the record reports the problem


@contextmanager
def watching(config: RunConfig, is_first_node: bool, signals: StopSignals) -> Iterator[EvalWatcher | None]:
    """Run a watcher within the block if `eval.watch` is set and this is the first node."""
    watcher = EvalWatcher(config) if config.eval.watch and is_first_node else None
    try:
        yield watcher
    finally:
        if watcher is not None:
            watcher.stop(signals)


def is_worth_restart(exit_code: int, run_is_finished: bool) -> bool:
    """Whether a restart may succeed; exit code 1 is a crash while the run trains, and failed evaluations afterwards."""
    final = {0, USER_ERROR_EXIT_CODE, STOPPED_EXIT_CODE} | ({SOME_FAILED} if run_is_finished else set())
    return exit_code not in final


def how_it_ended(exit_code: int) -> str:
    """Describe an exit code; as in `subprocess`, a negative one is a signal."""
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


def evaluation_environment(config: RunConfig) -> dict[str, str]:
    """Return the environment of an evaluation during training; variables that the user has set stay.

    Each rank has its share of the cores as threads, and vLLM on a CPU must not have more: its threads synchronize
    after every operation, so with all cores, one of them would always wait for a rank.
    """
    share = max(1, len(os.sched_getaffinity(0)) // (config.trainer.n_gpus_per_node + 1))
    environment = {"OMP_NUM_THREADS": str(share), **DEVICE_ORDER, **os.environ}
    names = config.eval.device_names
    return environment if names is None else {**environment, DEVICES: ",".join(names)}
