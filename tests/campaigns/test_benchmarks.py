"""Campaign: every baseline of a benchmark still runs on the installed libraries, and so does every benchmark."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.grpo import MAX_TOKENS, MODEL, write_prompts
from benchmarks.harness import run_ranks
from benchmarks.quick import CHECKS
from benchmarks.sft import BASELINES, BATCH_SIZE, ONE_THREAD, STOCK, STOCK_BATCH_SIZE
from tests.helpers import ROOT
from tests.helpers.commands import environment, python
from verl_ext.data.prepare import prepare


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmarks' training data, with the quickstart's chats and model."""
    path = tmp_path_factory.mktemp("inputs")
    prepare(["quickstart", "--output", str(path / "chats"), "--samples", "500"])
    (path / "model").symlink_to(path / "chats/model")
    write_prompts(path / "prompts.parquet")
    return path


@pytest.mark.parametrize("name", BASELINES)
def test_sft_baseline_trains(name: str, scratch: Path) -> None:
    function, variant, _ = BASELINES[name]
    steps = run_ranks(function, str(scratch), variant, "2", ranks=2, variables=ONE_THREAD)
    assert len(steps) == 2
    samples = STOCK_BATCH_SIZE if function == STOCK else BATCH_SIZE
    for step in steps:  # samples of about 100 tokens, or about as many tokens in packed rows
        assert samples * 25 < step["tokens"] < samples * 250


def test_trl_grpo_baseline_trains(scratch: Path) -> None:
    words = str(scratch / "model"), str(scratch), "2"
    steps = run_ranks("trl_ranks:grpo", *words, ranks=2, torchrun=True, variables=ONE_THREAD)
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["model_s"] and 0 < step["generation_s"]
        assert step["model_s"] + step["generation_s"] <= step["step_s"]
        assert 0 < step["tokens_mean"] <= MAX_TOKENS


def test_quick_benchmarks_measure() -> None:
    done = subprocess.run(
        ["bash", "benchmarks/run.sh", "--quick"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if ", committed " in line]
    assert [line.split()[0] for line in lines] == list(CHECKS), done.stdout


def test_small_benchmarks_measure(scratch: Path, tmp_path: Path) -> None:
    """`benchmarks.judge` is left out, which needs an environment with its peers."""
    prepare(["smollm2", "--output", str(MODEL)])
    few = ["tiers.tier1=[humaneval]", "datasets.humaneval.limit=4"]
    for name, *options in (
        ["plan", "--settings", "one rank, one long sample"],
        ["grpo", "--ranks", "2", "--engines", "hf", "--rounds", "1", "--num-steps", "2"],
        ["evaluation", "--model", scratch / "model", "--repeats", "1", "--commands", "0", *few],
    ):
        done = python(f"benchmarks.{name}", *options, "--output", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / name).read_text())["machine"]
