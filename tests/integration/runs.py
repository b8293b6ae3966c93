"""Real runs of `run_sft.sh` that a test can hold at a named call, damage, and start again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tests.conftest import ROOT
from tests.integration.test_sft_command import with_dropout
from tests.processes import ranks_of

TIMEOUT_S = 300
FAULTS = Path(__file__).parent / "faults"
NUM_STEPS = 6
"""Of every run here: an epoch and a half, so that a checkpoint at step 4 is the end of an epoch."""


@dataclass(frozen=True)
class Hold:
    """A call at which a rank waits until the test lets it go on; `faults/sitecustomize.py` does it.

    Attributes:
        module: where the function is looked up when it is called.
        function: its name there, `function` or `Class.method`.
        match: a part of a number, text or path among the arguments, by which the calls that count are known.
        rank: the rank that waits.
        when: before or after the call.
        call: number of the call among those that match, from 1.
    """

    module: str
    function: str
    match: str = ""
    rank: int = 0
    when: str = "before"
    call: int = 1


class Run:
    """`run_sft.sh 2` on the session's small quickstart with dropout, in one run directory.

    Args:
        quickstart: of the fixture of that name.
        run_dir: may hold checkpoints already.
        overrides: of the recipe, for every start.
        prefix: words before the command, such as `setpriv` and its options.
    """

    def __init__(self, quickstart: Path, run_dir: Path, *overrides: str, prefix: tuple[str, ...] = ()) -> None:
        self.run_dir = run_dir
        self.words = [
            *(*prefix, "bash", str(ROOT / "run_sft.sh"), "2", "prepare=[]", f"trainer.default_local_dir={run_dir}"),
            *(f"data.train_files={quickstart}/train.parquet", f"data.val_files={quickstart}/val.parquet"),
            *(f"model.partial_pretrain={with_dropout(quickstart / 'model')}", "data.train_max_samples=32"),
            *("data.train_batch_size=8", "data.micro_batch_size_per_gpu=4", "trainer.val_before_train=false"),
            *(f"trainer.total_training_steps={NUM_STEPS}", "trainer.test_freq=-1", "trainer.save_freq=2"),
            *("trainer.max_ckpt_to_keep=2", "trainer.logger=[console]", *overrides),
        ]
        self.environment = {**os.environ, "VERL_EXT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}

    def start(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        with self.started(self.environment, *overrides) as process:
            return end_of(process)

    @contextlib.contextmanager
    def held(self, hold: Hold, directory: Path, *overrides: str) -> Iterator[HeldRun]:
        """Start the command and wait until the rank waits at the call; whatever still runs afterwards is killed.

        Args:
            hold: the call.
            directory: an empty one, for the two files by which test and rank talk.
            overrides: of the recipe, for this start.
        """
        environment = {
            **self.environment,
            "PYTHONPATH": str(FAULTS),
            "HOLD": json.dumps({**asdict(hold), "directory": str(directory)}),
        }
        with self.started(environment, *overrides) as process:
            wait_until((directory / "reached").exists, process)
            yield HeldRun(process, directory / "go")

    @contextlib.contextmanager
    def started(self, environment: dict[str, str], *overrides: str) -> Iterator[subprocess.Popen[str]]:
        """The command, and nothing left of it afterwards."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*self.words, *overrides], text=True, env=environment, **pipes)
        try:
            yield process
        finally:
            process.kill()  # its ranks die with it
            process.wait()

    @property
    def last_checkpoint(self) -> Path:
        """Of a finished run."""
        return self.run_dir / f"global_step_{NUM_STEPS}"

    def names(self) -> set[str]:
        """Names of the checkpoint directories, whole and unfinished ones."""
        return {path.name.removeprefix("global_step_") for path in self.run_dir.glob("global_step_*")}

    def tracker(self) -> str:
        """What `latest_checkpointed_iteration.txt` says."""
        return (self.run_dir / "latest_checkpointed_iteration.txt").read_text()

    def losses(self, attempt: int) -> dict[int, float]:
        """Loss by step, as one attempt logged it."""
        rows = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return {row["step"]: row["train/loss"] for row in rows if row["attempt"] == attempt and "train/loss" in row}

    def attempts(self) -> list[dict]:
        """What `run.json` says of the starts."""
        return json.loads((self.run_dir / "run.json").read_text())["attempts"]


@dataclass
class HeldRun:
    """A run one of whose ranks waits.

    Attributes:
        process: the launcher.
        go: the file that lets the rank go on.
    """

    process: subprocess.Popen[str]
    go: Path

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes."""
        return ranks_of(self.process.pid)

    def release(self) -> subprocess.CompletedProcess[str]:
        """Let the rank go on, and wait for the end of the command."""
        self.go.touch()
        return end_of(self.process)


def end_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command."""
    stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait for something that a live process is going to do."""
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)
