"""Training commands as users run them: start, hold at a call, kill and resume `run_sft.sh` and `run_grpo.sh`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.helpers import ROOT, warm
from tests.helpers.processes import WAIT_S, family_of, ranks_of, wait_gone, wait_until
from verl_ext.checkpoint.manifest import damaged_files
from verl_ext.metrics.jsonl import read_metrics

NUM_STEPS = 6
"""Number of steps of an `SFTRun`: one and a half epochs, so step 4 ends an epoch."""
FAULTS = ROOT / "tests/faults"


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: this process's with additional variables."""
    ours = {"VERL_EXT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    return {**os.environ, **ours, **variables}


def python(*words: str | os.PathLike[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE ...` in the repository to its end."""
    command = [sys.executable, "-m", *map(os.fspath, words)]
    return warm.run(command, **{"cwd": ROOT, "env": environment(), **options})


def torchrun(num_ranks: int, module: str, *words: str | os.PathLike[str]) -> None:
    """Run a module of `tests/ranks` on this many ranks; every rank must succeed."""
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}")
    imports = "vllm" if module.endswith(".engines") else "torch"
    done = python(*launcher, "-m", module, *words, env=environment(PYTHONPATH=str(ROOT)), imports=imports)
    assert done.returncode == 0, done.stdout + done.stderr


class TrainingRun:
    """A training command in one run directory, which may be started many times.

    Args:
        words: the command line.
        run_dir: run directory; may already contain checkpoints.
        imports: what a warm start has loaded, see `warm.popen`.
        cold: start new processes only.
        cwd: working directory of the command; None for this process's.
        variables: additional environment variables.
    """

    def __init__(
        self,
        words: Sequence[str],
        run_dir: Path,
        *,
        imports: str = "torch",
        cold: bool = False,
        cwd: Path | None = None,
        **variables: str,
    ) -> None:
        self.words, self.run_dir = list(words), run_dir
        self.imports, self.cold, self.cwd = imports, cold, cwd
        self.environment = environment(**variables)

    def popen(self, *overrides: str, **options: Any) -> subprocess.Popen[str]:
        """Start the command; its output is in pipes unless options of `Popen` say otherwise."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        options = {**pipes, "env": self.environment, "cwd": self.cwd, **options}
        words = [*self.words, *overrides]
        return subprocess.Popen(words, **options) if self.cold else warm.popen(words, imports=self.imports, **options)

    def start(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        with self.started(*overrides) as process:
            return end_of(process)

    def finish(self, *overrides: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; it must succeed."""
        result = self.start(*overrides)
        assert result.returncode == 0, result.stdout + result.stderr
        return result

    @contextlib.contextmanager
    def started(self, *overrides: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """Start the command with additional variables; end all its processes after the block."""
        process = self.popen(*overrides, env={**self.environment, **variables})
        try:
            yield process
        finally:
            process.kill()  # its ranks die with it
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    @contextlib.contextmanager
    def held(self, hold: Hold, directory: Path, *overrides: str) -> Iterator[HeldRun]:
        """Start the command and wait until a rank is held at a call; kill all its processes after the block.

        Args:
            hold: the call.
            directory: an empty one, for the two files by which test and rank communicate.
            overrides: recipe overrides for this start.
        """
        with self.started(*overrides, **hold.variables(directory)) as process:
            wait_until((directory / "reached").exists, process)
            yield HeldRun(process, directory / "go")

    def names(self) -> set[str]:
        """Names of the checkpoint directories without `global_step_`, complete and unfinished ones."""
        return {path.name.removeprefix("global_step_") for path in self.run_dir.glob("global_step_*")}

    def tracker(self) -> str:
        """The content of `latest_checkpointed_iteration.txt`."""
        return (self.run_dir / "latest_checkpointed_iteration.txt").read_text()

    def rows(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`; empty before the first."""
        path = self.run_dir / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def losses(self, attempt: int | None = None) -> dict[int, float]:
        """Loss by step, of one attempt or of all."""
        rows = [row for row in self.rows() if attempt in (None, row["attempt"])]
        return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}

    def last_logged(self) -> int:
        """The last step with a row, 0 before the first."""
        return max((row["step"] for row in self.rows()), default=0)

    def record(self) -> dict[str, Any]:
        """The content of `run.json`."""
        return json.loads((self.run_dir / "run.json").read_text())

    def attempts(self) -> list[dict[str, Any]]:
        """The attempts in `run.json`."""
        return self.record()["attempts"]


class SFTRun(TrainingRun):
    """`run_sft.sh` on the session's quickstart with dropout.

    Args:
        quickstart: directory of the `quickstart` fixture.
        run_dir: run directory; may already contain checkpoints.
        overrides: recipe overrides for every start.
        num_ranks: number of ranks.
        dropout: needed to notice a resume that lost the random state; its masks depend on the number of ranks.
        prefix: words before the command, such as `setpriv` and its options; they make it a cold start.
        cold: start new processes only.
    """

    def __init__(
        self,
        quickstart: Path,
        run_dir: Path,
        *overrides: str,
        num_ranks: int = 2,
        dropout: bool = True,
        prefix: tuple[str, ...] = (),
        cold: bool = False,
    ) -> None:
        model = quickstart / ("model_with_dropout" if dropout else "model")
        words = [
            *(*prefix, "bash", str(ROOT / "run_sft.sh"), str(num_ranks), "prepare=[]"),
            *(f"trainer.default_local_dir={run_dir}", f"model.partial_pretrain={model}"),
            *(f"data.train_files={quickstart}/train.parquet", f"data.val_files={quickstart}/val.parquet"),
            *("data.train_max_samples=32", "data.train_batch_size=8", "data.micro_batch_size_per_gpu=4"),
            *(f"trainer.total_training_steps={NUM_STEPS}", "trainer.val_before_train=false", "trainer.test_freq=-1"),
            *("trainer.save_freq=2", "trainer.max_ckpt_to_keep=2", "trainer.logger=[console]", *overrides),
        ]
        super().__init__(words, run_dir, cold=cold)

    @property
    def last_checkpoint(self) -> Path:
        """The last checkpoint of a finished run."""
        return self.run_dir / f"global_step_{NUM_STEPS}"


class GRPORun(TrainingRun):
    """`run_grpo.sh` of four steps on the session's quickstart.

    Args:
        quickstart: directory of the `quickstart` fixture.
        run_dir: run directory; may already contain checkpoints.
        overrides: recipe overrides for every start.
        num_ranks: number of ranks.
        cold: start new processes only.
    """

    def __init__(
        self, quickstart: Path, run_dir: Path, *overrides: str, num_ranks: int = 2, cold: bool = False
    ) -> None:
        words = [
            *("bash", str(ROOT / "run_grpo.sh"), str(num_ranks), "prepare=[]", f"trainer.default_local_dir={run_dir}"),
            *(f"data.train_files={quickstart}/prompts.parquet", f"data.val_files={quickstart}/val_prompts.parquet"),
            *(f"model.partial_pretrain={quickstart}/model", "data.train_batch_size=4", "actor.ppo_mini_batch_size=2"),
            *("data.micro_batch_size_per_gpu=4", "rollout.n=4", "data.max_response_length=16"),
            # these rewards differ between completions of an untrained model
            *("reward.functions=[exec_success,length_penalty]", "reward.length_buffer=15"),
            *("trainer.logger=[console]", "trainer.save_freq=2", "trainer.total_training_steps=4"),
            *("data.eval_every_steps=2", "data.eval_batches=2", *overrides),
        ]
        imports = "torch" if "rollout.engine=hf" in overrides else "vllm"
        super().__init__(words, run_dir, imports=imports, cold=cold)


def script_run(script: str, num_ranks: int, run_dir: Path, *overrides: str, cwd: Path | None = None) -> TrainingRun:
    """`run_sft.sh` or `run_grpo.sh` with these arguments only, which must choose `run_dir`."""
    return TrainingRun(["bash", str(ROOT / script), str(num_ranks), *overrides], run_dir, cwd=cwd)


class RecipeRun(TrainingRun):
    """`run_sft.sh` or `run_grpo.sh` with a recipe file.

    Args:
        script: `run_sft.sh` or `run_grpo.sh`.
        recipe: the file.
        run_dir: run directory; may already contain checkpoints.
        overrides: recipe overrides for every start.
        num_ranks: number of ranks.
        cold: start new processes only.
        cwd: working directory of the command; None for this process's.
    """

    def __init__(
        self,
        script: str,
        recipe: Path | str,
        run_dir: Path,
        *overrides: str,
        num_ranks: int = 1,
        cold: bool = False,
        cwd: Path | None = None,
    ) -> None:
        words = ["bash", str(ROOT / script), str(num_ranks), f"recipe={recipe}", f"trainer.default_local_dir={run_dir}"]
        super().__init__([*words, *overrides], run_dir, cold=cold, cwd=cwd)


@dataclass(frozen=True)
class Hold:
    """A call at which a rank waits until the test releases it; implemented by `tests/faults/sitecustomize.py`.

    Attributes:
        module: module in which the function is looked up.
        function: its name there, `function` or `Class.method`.
        match: a part of a number, text or path among the arguments of the calls that count.
        rank: the rank that waits.
        when: `before` or `after` the call; `never`: the rank does not wait, and this call and later ones do nothing.
        call: number of the call among those that match, from 1.
    """

    module: str
    function: str
    match: str = ""
    rank: int = 0
    when: str = "before"
    call: int = 1

    def variables(self, directory: Path) -> dict[str, str]:
        """The environment in which a command's rank is held; test and rank communicate by files in the directory."""
        return {"PYTHONPATH": str(FAULTS), "HOLD": json.dumps({**asdict(self), "directory": str(directory)})}


@dataclass
class HeldRun:
    """A run of which one rank waits.

    Attributes:
        process: the launcher.
        go: the file that lets the rank continue.
    """

    process: subprocess.Popen[str]
    go: Path

    def ranks(self) -> dict[int, psutil.Process]:
        """The ranks' processes."""
        return ranks_of(self.process.pid)

    def release(self) -> subprocess.CompletedProcess[str]:
        """Let the rank continue, and wait for the end of the command."""
        self.go.touch()
        return end_of(self.process)


def end_of(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for the end of a command whose output is in pipes."""
    stdout, stderr = process.communicate(timeout=WAIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def kill_launcher(process: subprocess.Popen[Any]) -> None:
    """SIGKILL only the launcher; its ranks must end, too."""
    family = family_of(process)
    process.kill()
    process.wait()
    wait_gone(family)


def assert_resumes(run: SFTRun, undisturbed: SFTRun, step: int, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Start a run again and check that it resumes from `step` and ends like the undisturbed run.

    Args:
        run: started any number of times.
        undisturbed: the same run without interruption.
        step: step of the checkpoint.
        overrides: recipe overrides for this start.

    Returns:
        The command's output.
    """
    result = run.finish(*overrides)
    assert f"Found checkpoint: {run.run_dir}/global_step_{step}\n" in result.stdout
    assert_undisturbed(run, undisturbed, step)
    return result


def assert_undisturbed(run: SFTRun, undisturbed: SFTRun, begun_at: int) -> None:
    """Check that a finished run's losses, last checkpoint and directory equal those of the undisturbed run.

    Args:
        run: started any number of times.
        undisturbed: the same run without interruption.
        begun_at: the step at which the last start began.
    """
    from tests.helpers.checkpoints import assert_same_checkpoint  # imports torch

    expected, number = undisturbed.losses(1), len(run.attempts())
    for attempt in range(1, number):
        assert run.losses(attempt).items() <= expected.items(), (run.losses(attempt), expected)
    losses = run.losses(number)
    assert losses == {step: loss for step, loss in expected.items() if step > begun_at}, (losses, expected)
    assert run.tracker() == str(NUM_STEPS)
    assert all(name.isdigit() for name in run.names()), run.names()
    assert [damaged_files(path) for path in run.run_dir.glob("global_step_*")] == [{}] * len(run.names())
    assert_same_checkpoint(run.last_checkpoint, undisturbed.last_checkpoint)
