"""The process of `python -m eval_pipeline watch`, which dies with its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from verl_ext.console import warn
from verl_ext.files import write_errors
from verl_ext.processes import DEVICES, end_with_parent
from verl_ext.trainer.stages import RunConfig

LOG = Path("eval", "watch.log")
LAST_BYTES = 4096


class WatchProcess:
    """One watcher, again and again; one thread runs it, any thread may end it.

    Args:
        config: of the run.
        run_dir: of the run, absolute.

    Raises:
        UserError: its log cannot be written.
    """

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._command = [sys.executable, "-m", "eval_pipeline", "watch", str(run_dir)]
        self._command.append(f"--recipe={config.eval.recipe_name}")  # one word, whatever it begins with
        self._environment = evaluation_environment(config)
        self._path = run_dir / LOG
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False
        with write_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._log = open(self._path, "ab")

    def run(self) -> int:
        """Run it to its end; returns its exit code, 1 where it cannot be started, 0 after `terminate`."""
        with self._lock:
            if self._is_ended:
                return 0
            try:
                self._process = self._start()
            except OSError as error:
                warn(f"the evaluation cannot start ({error.strerror})")
                return 1
        return self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for the launcher, which decides what becomes of this
            preexec_fn=_die_with_parent,
        )

    def terminate(self) -> None:
        """Ask it to end, and start it no more."""
        with self._lock:
            self._is_ended = True
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)  # nothing where it has ended

    def last_line(self) -> str:
        """The last that it wrote."""
        with open(self._path, "rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - LAST_BYTES, 0))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "its log is empty"

    def close(self) -> None:
        """Close the log."""
        self._log.close()


def _die_with_parent() -> None:
    """Between fork and exec; a launcher that is killed by SIGKILL must not leave an evaluation behind."""
    end_with_parent(signal.SIGTERM)


def evaluation_environment(config: RunConfig) -> dict[str, str]:
    """The environment of an evaluation beside the training; what the user has set stays.

    Each rank has its share of the cores as threads. vLLM must not have more on a CPU: its threads wait for each other
    at the end of every operation, and with all cores, one of them would always wait for a rank to let it run.
    """
    share = max(1, len(os.sched_getaffinity(0)) // (config.trainer.n_gpus_per_node + 1))
    environment = {"OMP_NUM_THREADS": str(share), **os.environ}
    names = config.eval.device_names
    return environment if names is None else {**environment, DEVICES: ",".join(names)}
