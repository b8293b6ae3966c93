"""Evaluation during training: `eval.watch=true` starts `python -m eval_pipeline watch` and waits for its end."""

from __future__ import annotations

import shlex
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_ext.checkpoint.retention import read_choice
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_next, typed_path, warn
from verl_ext.errors import STOPPED_EXIT_CODE, USER_ERROR_EXIT_CODE, UserError
from verl_ext.launch.restarts import FIRST_PAUSE_S, pause_before
from verl_ext.launch.summary import next_after_evaluation, with_recipe
from verl_ext.launch.watch_process import LOG, WatchProcess
from verl_ext.metrics.run_file import RUN_FILE, load_run
from verl_ext.processes import StopRequest, StopSignals
from verl_ext.trainer.stages import RunConfig

POLL_S = 0.1
STOP_S = 30.0
"""How long the watcher may take to end its engine when the training ends unfinished."""
SOME_FAILED = 1
"""Exit code of a watcher that has seen the run to its end and could not evaluate everything."""
RESTARTS = 3
"""How often a watcher that crashed is started again without a checkpoint having been evaluated meanwhile."""


class Watcher:
    """A watcher that runs until the run has finished and is evaluated; one that crashes is started again.

    Args:
        config: of the run; `eval.devices` are the GPUs that the training leaves free.
        first_pause_s: seconds before the first restart; each pause is twice the one before.

    Raises:
        UserError: its log cannot be written.
    """

    def __init__(self, config: RunConfig, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self._config = config
        self._run_dir = Path(config.trainer.default_local_dir).absolute()
        self._process = WatchProcess(config, self._run_dir)
        self._first_pause_s = first_pause_s
        self._exit_code = 0
        self._stopping = threading.Event()
        # the process dies with the thread that forked it, which therefore lives as long
        self._thread = threading.Thread(target=self._keep, name="watcher", daemon=True)
        self._thread.start()

    def finish(self, signals: StopSignals) -> int:
        """Wait until every checkpoint of the finished run is evaluated, or a stop signal ends the waiting.

        Returns:
            The exit code of the command: that of a stop, or 0, since the training itself is done.
        """
        log = typed_path(self._run_dir / LOG)
        if self._thread.is_alive():
            print_line(f"Waiting for the evaluation of every checkpoint; {log} shows the progress.")
        try:
            with signals.raising():
                while self._thread.is_alive():
                    self._thread.join(POLL_S)
        except StopRequest as stop:
            print_line(f"Stopped by {stop.signal.name} while evaluating; the same command resumes the evaluation.")
            return stop.exit_code
        if self._exit_code:
            self._tell_failure()
        else:
            best, _ = read_choice(self._run_dir)
            results = typed_path(self._run_dir / LOG.parent)
            print_line(
                f"Evaluation finished: results are in {results}" + (f", the best is {best.name}" if best else "")
            )
            print_next(next_after_evaluation(self._config))
        return 0

    def stop(self, signals: StopSignals) -> None:
        """End it, at once if the launcher is asked for that; what it has done is kept, and the next start resumes."""
        self._stopping.set()
        self._process.terminate()
        deadline = time.monotonic() + STOP_S
        while self._thread.is_alive() and time.monotonic() < deadline and signals.immediate is None:
            self._thread.join(POLL_S)
        self._process.kill()
        self._thread.join()
        self._process.close()

    def _keep(self) -> None:
        reached, used = self._num_evaluated(), 0
        while True:
            self._exit_code = self._process.run()
            if self._stopping.is_set() or not self._exit_code:
                return
            if (now := self._num_evaluated()) > reached:
                reached, used = now, 0
            if not may_go_better(self._exit_code, self._is_finished()) or used == RESTARTS:
                return self._warn_of_end()
            used += 1
            pause = pause_before(used, self._first_pause_s)
            self._warn(f"restart {used} of {RESTARTS} in {pause:g} s; see {typed_path(self._run_dir / LOG)}")
            self._stopping.wait(pause)

    def _warn_of_end(self) -> None:
        if not self._is_finished():  # else `finish` says it, now
            self._warn(
                f"training continues without it ({self._process.last_line()}); see {typed_path(self._run_dir / LOG)}, "
                f"and resume it with `{shlex.join(with_recipe(self._config, 'watch', typed_path(self._run_dir)))}`"
            )

    def _tell_failure(self) -> None:
        """Say that the finished run is not evaluated, or only in part, and what shows why and tries again."""
        some = [typed_path(self._run_dir)]
        if self._exit_code == SOME_FAILED:
            reason = "some of its evaluations failed, or it found no checkpoint to evaluate"
            then = [[*typed_command("eval"), command, *some] for command in ("status", "retry")]
        else:
            reason, then = self._process.last_line().removeprefix("error: "), []
        print_line(
            f"error: training finished, but the evaluation {how_it_ended(self._exit_code)} ({reason}); see "
            f"{typed_path(self._run_dir / LOG)}",
            sys.stderr,
        )
        print_next([*then, with_recipe(self._config, "watch", *some)])

    def _warn(self, what_follows: str) -> None:
        warn(f"the evaluation during training {how_it_ended(self._exit_code)}; {what_follows}")

    def _num_evaluated(self) -> int:
        return len(list(self._run_dir.glob("eval/eval_step_*/metrics.json")))

    def _is_finished(self) -> bool:
        try:
            return load_run(self._run_dir / RUN_FILE)["status"] == "finished"
        except UserError:
            return False  # whoever writes the record says what is wrong with it


class NoWatcher:
    """In its place where nobody asked for one."""

    def finish(self, signals: StopSignals) -> int:
        """Nothing is left to do."""
        return 0

    def stop(self, signals: StopSignals) -> None:
        """Nothing is running."""


@contextmanager
def watching(config: RunConfig, leads: bool, signals: StopSignals) -> Iterator[Watcher | NoWatcher]:
    """A watcher within the block, where the configuration asks for one; the first node's launcher has it.

    Args:
        config: of the run.
        leads: whether this is the first node.
        signals: what the launcher is asked.
    """
    watcher = Watcher(config) if config.eval.watch and leads else NoWatcher()
    try:
        yield watcher
    finally:
        watcher.stop(signals)


def how_it_ended(exit_code: int) -> str:
    """Words for an exit code; as with `subprocess`, a negative one is that of a signal."""
    return f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"


def may_go_better(exit_code: int, run_is_finished: bool) -> bool:
    """Whether a watcher that ended so is worth another start.

    Args:
        exit_code: of the watcher; bad input stays bad, and whoever asked it to stop meant it.
        run_is_finished: a watcher that has seen the run to its end says by 1 that a data set failed; before, 1 is a
            crash.
    """
    final = {0, USER_ERROR_EXIT_CODE, STOPPED_EXIT_CODE} | ({SOME_FAILED} if run_is_finished else set())
    return exit_code not in final
