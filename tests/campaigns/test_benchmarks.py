"""Campaign: every baseline of a benchmark still runs on the installed libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.grpo import GRPOJob, write_prompts
from benchmarks.harness import run_ranks, write_job
from benchmarks.sft import BARE, BASELINES, SFTJob
from verl_ext.data.prepare import prepare

SIDES = {name: ("sft_ranks:bare", variant) for name, (variant, _) in BARE.items()} | BASELINES
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "quickstart"
    prepare(["quickstart", "--output", str(path), "--samples", "500"])
    return path


@pytest.mark.parametrize("name", SIDES)
def test_a_side_of_the_sft_benchmark_trains(name: str, quickstart: Path, tmp_path: Path) -> None:
    function, variant = SIDES[name]
    job = SFTJob(
        data=str(quickstart / "train.parquet"),
        model=str(quickstart / "model"),
        output=str(tmp_path),
        batch_size=16,
        num_steps=2,
        max_length=128,
        variant=variant,
    )
    steps, _ = run_ranks(function, write_job(job, tmp_path / "job.json"), 2, ONE_THREAD)
    assert len(steps) == 2
    for step in steps:  # 16 samples of about 100 tokens, or as many tokens in packed rows
        assert 16 * 25 < step["tokens"] < 16 * 250


def test_trls_side_of_the_grpo_benchmark_trains(quickstart: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.parquet")
    job = GRPOJob(
        model=str(quickstart / "model"),
        prompts=str(tmp_path / "prompts.parquet"),
        output=str(tmp_path),
        num_steps=2,
        group_size=4,
        num_samples=8,
        micro_batch_size=4,
        max_tokens=8,
        lr=1e-6,
    )
    steps, versions = run_ranks("trl_ranks:grpo", write_job(job, tmp_path / "job.json"), 2, ONE_THREAD)
    assert len(steps) == 2 and versions.keys() == {"trl", "transformers", "accelerate"}
    for step in steps:
        assert 0 < step["model_s"] and 0 < step["generation_s"]
        assert step["model_s"] + step["generation_s"] <= step["step_s"]
        assert 0 < step["tokens_mean"] <= 8
