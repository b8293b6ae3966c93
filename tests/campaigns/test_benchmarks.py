"""Campaign: every baseline of a benchmark still runs on the installed libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grpo import MAX_TOKENS, write_prompts
from benchmarks.harness import run_ranks
from benchmarks.sft import BASELINES, BATCH_SIZE, ONE_THREAD, STOCK, STOCK_BATCH_SIZE
from verl_ext.data.prepare import prepare


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the benchmarks train on, with the quickstart's chats and model."""
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
