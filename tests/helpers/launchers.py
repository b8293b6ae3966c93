"""Launchers on small ranks (`tests/ranks/small_launch.py`), started cold and watched from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import ROOT
from tests.helpers.processes import WAIT_S, children_of, family_of, wait_gone, wait_until, words_of

RANK_MODULE = "tests.ranks.small_ranks"


class Launcher:
    """A started launcher; its output goes to files."""

    def __init__(self, words: list[str], directory: Path, environment: dict[str, str], **options: Any) -> None:
        self.environment = environment
        self.paths = {name: directory / name for name in ("out", "err")}
        with self.paths["out"].open("w") as out, self.paths["err"].open("w") as err:
            streams = {"stdout": out, "stderr": err, **options}
            self.process = subprocess.Popen(words, cwd=ROOT, env={**os.environ, **environment}, **streams)
        self.seen: list[psutil.Process] = []

    def output(self, name: str = "out") -> str:
        return self.paths[name].read_text()

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait for a condition while the launcher runs."""

        def holds() -> object:
            self.note_children()
            return condition()

        try:
            wait_until(holds, self.process)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output()}{self.output('err')}") from error

    def wait_while_running(self, seconds: float) -> None:
        """Wait; the launcher must not end meanwhile."""
        time.sleep(seconds)
        assert self.process.poll() is None, self.output() + self.output("err")

    def note_children(self) -> None:
        if self.process.poll() is None:
            self.seen = family_of(self.process) or self.seen

    def has_a_rank(self) -> bool:
        """Whether the process of a rank has started; it may not have imported anything yet."""
        return any(RANK_MODULE in words_of(child) for child in children_of(self.process))

    def listens_on(self, port: int) -> bool:
        """Whether the launcher waits for other nodes on a TCP port."""
        sockets = psutil.Process(self.process.pid).net_connections("tcp")
        return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets)

    def ignores(self, number: signal.Signals) -> bool:
        """Whether the launcher ignores a signal, according to the kernel."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [mask] = [line.split()[1] for line in lines if line.startswith("SigIgn:")]
        return bool(int(mask, 16) >> (number - 1) & 1)

    def end(self) -> int:
        """Wait for the exit code. No rank may be left, and there may be no traceback."""
        self.note_children()
        code = self.process.wait(WAIT_S)
        wait_gone(self.seen)
        assert "Traceback" not in self.output() + self.output("err")
        return code

    def clean_up(self) -> None:
        self.note_children()
        self.process.kill()
        self.process.wait()
        for process in self.seen:
            if process.is_running():
                process.kill()


class SmallLaunches:
    """The launchers of one test, all in the run directory `directory/run`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launchers: list[Launcher] = []

    def start(
        self,
        behavior: str,
        *,
        grace_s: float = 60,
        restarts: int = 0,
        pause_s: float = 0.1,
        leave_after_s: float = 10,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> Launcher:
        """Start two ranks that behave as a function of `tests/ranks/small_ranks.py` does.

        Args:
            behavior: name of the function.
            grace_s: seconds that ranks have to save.
            restarts: number of restarts after crashes.
            pause_s: seconds before the first restart.
            leave_after_s: seconds that the launcher waits for torchrun when no rank is left.
            environment: additional variables.
            options: keyword arguments of `subprocess.Popen`.
        """
        files = self.directory / f"files{len(self.launchers)}"
        for directory in (self.run_dir, files):
            directory.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "tests.ranks.small_launch", str(self.run_dir)]
        words += map(str, (grace_s, restarts, pause_s, leave_after_s))
        return self.add(Launcher(words, files, {"SMALL_RANKS": behavior, **(environment or {})}, **options))

    def add(self, launcher: Launcher) -> Launcher:
        """Have a launcher cleaned up with the others."""
        self.launchers.append(launcher)
        return launcher

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def record(self) -> dict[str, Any]:
        """The content of run.json."""
        path = self.run_dir / "run.json"
        return json.loads(path.read_text()) if path.exists() else {"status": None, "attempts": []}

    def is_ready(self, *ranks: int) -> bool:
        """Whether these ranks handle signals."""
        return all((self.run_dir / f"ready_{rank}").exists() for rank in ranks)

    def wait_until_ready(self, launcher: Launcher, *ranks: int) -> None:
        launcher.wait_for(lambda: self.is_ready(*(ranks or (0, 1))))


@contextlib.contextmanager
def small_launches(directory: Path) -> Iterator[SmallLaunches]:
    """Starts launchers in a directory, and in the end kills those that still run."""
    launches = SmallLaunches(directory)
    try:
        yield launches
    finally:
        for launcher in launches.launchers:
            launcher.clean_up()


PHASES: dict[str, Callable[[SmallLaunches, Launcher], object]] = {
    "waiting": lambda launches, launcher: launches.record()["status"] == "waiting",
    "first rank started": lambda launches, launcher: launcher.has_a_rank(),
    "first rank ready": lambda launches, launcher: launches.is_ready(0) or launches.is_ready(1),
    "both ranks ready": lambda launches, launcher: launches.is_ready(0, 1),
}
"""Phases of a start, in order. In the first one torch is being imported."""


def check_signal_is_not_lost(launches: SmallLaunches, phase: str, delay_s: float = 0) -> None:
    """Check that a signal `delay_s` after the start of a phase stops the launcher; its ranks ignore signals."""
    launcher = launches.start("ignore_everything", restarts=3, grace_s=1)
    launcher.wait_for(lambda: PHASES[phase](launches, launcher))
    time.sleep(delay_s)
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.end() == 75
    assert launches.record()["status"] == "stopped"
    assert len(launches.record()["attempts"]) == 1
