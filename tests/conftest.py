"""Fixtures of all tests. Runs that several tests read are created once per session, for any number of workers.

Shared runs are read-only: tests that damage or resume one copy what they need.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

import verl_ext  # noqa: F401  # before any test imports verl

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.helpers.commands import GRPORun, RecipeRun, SFTRun

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    """Restore signals that this process inherited as ignored (`nohup`, `&`), so that tests' processes receive them.

    A no-op handler replaces them, because exec keeps ignored signals but resets handlers to the default.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


LONGEST_FIRST = (
    *("eval_engines", "sft_command", "grpo_command", "launcher_signals", "budget_command", "eval_during_training"),
    *("monitor_browser", "eval_ray", "eval_watch", "grpo_engines", "faults", "secrets_in_a_run", "judge_hostile"),
    *("preemption", "from_verl", "damaged_checkpoints", "eval_run", "failed_saves"),
    *("judge_verdicts", "compiled_blocks", "grpo_rewards", "eval_extract", "token_cache"),
)
"""Files that take 10 s or more, as `-p tests.helpers.costs` measures: the two workers end at about the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first; pytest-xdist gives each file to the next free worker."""
    places = {f"test_{name}": place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A directory that all workers of the session share."""
    base = tmp_path_factory.getbasetemp()
    directory = (base if worker_id == "master" else base.parent) / "shared"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session", autouse=True)
def session_environment(shared: Path) -> Iterator[None]:
    """Set a separate cache directory and the directory of the warm servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared / "cache"))
        patch.setenv("TESTS_WARM_DIRECTORY", str(shared))
        yield


def made_once(directory: Path, make: Callable[[], object]) -> Path:
    """Create a directory's content unless another worker has; other workers wait for it.

    Each worker that needs an unfinished directory creates it again, so that each reports the error.
    """
    done = directory.with_suffix(".done")
    with FileLock(directory.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(directory, ignore_errors=True)
            make()
            done.touch()
    return directory


@pytest.fixture(scope="session")
def quickstart(shared: Path) -> Path:
    """`model/`, `model_with_dropout/`, `train.parquet`, `val.parquet`, `problems.jsonl` and prompts, all small."""
    directory = shared / "quickstart"

    def make() -> None:
        import json

        from verl_ext.data.prepare import prepare

        prepare(["quickstart", "--output", str(directory), "--samples", "500"])
        with_dropout = Path(shutil.copytree(directory / "model", directory / "model_with_dropout"))
        config = json.loads((with_dropout / "config.json").read_text())
        (with_dropout / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))

    return made_once(directory, make)


@pytest.fixture(scope="session")
def sft_run(quickstart: Path, shared: Path) -> SFTRun:
    """A finished run of six steps on two ranks: every checkpoint, validations, a trace and all loggers."""
    from tests.helpers.commands import SFTRun

    own = (
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=null",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
    )
    run = SFTRun(quickstart, shared / "sft_run", *own, "trainer.logger=[console,tensorboard,wandb]", "--trace")
    made_once(run.run_dir, lambda: (shared / "sft_run.out").write_text(run.finish().stdout))
    return run


@pytest.fixture(scope="session")
def grpo_run(quickstart: Path, shared: Path) -> GRPORun:
    """A finished run of four steps on two ranks with vLLM, a trace and samples of every second step."""
    from tests.helpers.commands import GRPORun

    samples = ("trainer.log_samples_every=2", "trainer.log_sample_tokens=true")
    run = GRPORun(quickstart, shared / "grpo_run", "--trace", *samples)
    made_once(run.run_dir, lambda: (shared / "grpo_run.out").write_text(run.finish().stdout))
    return run


@pytest.fixture(scope="session")
def budget_inputs(shared: Path) -> Path:
    """`recipe.yaml` of the stage `budget`, with the questions, the model and the latency model that it names."""
    from tests.helpers.data import write_budget_inputs

    return made_once(shared / "budget_inputs", lambda: write_budget_inputs(shared / "budget_inputs"))


@pytest.fixture(scope="session")
def budget_run(budget_inputs: Path, shared: Path) -> RecipeRun:
    """A finished run of the stage `budget` on one rank, two epochs of four steps, with an export."""
    from tests.helpers.commands import RecipeRun

    export = "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    run = RecipeRun("run_grpo.sh", budget_inputs / "recipe.yaml", shared / "budget_run", export)
    made_once(run.run_dir, lambda: (shared / "budget_run.out").write_text(run.finish().stdout))
    return run


@pytest.fixture(scope="session")
def few_problems(quickstart: Path, shared: Path) -> Path:
    """A recipe of an evaluation of four problems and sixteen tokens each."""
    path = shared / "few_problems.yaml"
    path.write_text(
        f"datasets: {{few: {{format: quickstart, path: {quickstart}/problems.jsonl, limit: 4}}}}\n"
        "tiers: {tier1: [few]}\nsampling: {max_tokens: 16}\npoll_s: 0.5\nwandb: false\n"
    )
    return path


@pytest.fixture(scope="session")
def watched_run(quickstart: Path, few_problems: Path, shared: Path) -> SFTRun:
    """A finished run with `eval.watch=true`, whose watcher was killed once: checkpoints 2, 4 and 6 are evaluated.

    What the command printed is in `watched_run.out` and `watched_run.err` next to the run directory.
    """
    from tests.helpers.commands import SFTRun, end_of
    from tests.helpers.processes import running, wait_until

    watch = ("eval.watch=true", f"eval.recipe={few_problems}", "trainer.max_ckpt_to_keep=9")
    run = SFTRun(quickstart, shared / "watched_run", *watch)
    run.imports = "vllm"

    def make() -> None:
        with run.started() as process:
            [watcher, *_] = wait_until(lambda: running("watch", str(run.run_dir)), process)
            watcher.kill()
            result = end_of(process)
        (shared / "watched_run.out").write_text(result.stdout)
        (shared / "watched_run.err").write_text(result.stderr)
        assert result.returncode == 0, result.stderr

    made_once(run.run_dir, make)
    return run


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """Headless Chromium; without one the test is skipped."""
    from tests.helpers.monitor import browser

    with browser() as running:
        yield running


@pytest.fixture(scope="session")
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
