"""Campaign: every side that a benchmark compares ours with still runs on the installed libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grpo_runs import write_prompts
from benchmarks.running import run
from benchmarks.sft import BARE, PEERS
from benchmarks.sft_job import Job
from verl_ext.data.prepare import prepare

SIDES = {name: ("sft_bare", way) for name, (way, _) in BARE.items()} | PEERS


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "quickstart"
    prepare(["quickstart", "--output", str(path), "--samples", "500"])
    return path


def steps_of(side: str, job: Path) -> list[dict[str, Any]]:
    """What two ranks of a side print of their steps."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = run([*command, "-m", "benchmarks.side", side, str(job)], OMP_NUM_THREADS="1")
    return [json.loads(line.removeprefix("STEP ")) for line in output.splitlines() if line.startswith("STEP ")]


@pytest.mark.parametrize("name", SIDES)
def test_a_side_of_the_sft_benchmark_trains(name: str, quickstart: Path, tmp_path: Path) -> None:
    side, way = SIDES[name]
    job = Job(
        str(quickstart / "train.parquet"), str(quickstart / "model"), str(tmp_path), 16, 2, 128, way
    ).save(tmp_path / "job.json")  # fmt: skip
    steps = steps_of(side, job)
    assert len(steps) == 2
    for step in steps:  # 16 samples of about 100 tokens, or as many tokens in packed rows
        assert 16 * 25 < step["tokens"] < 16 * 250


def test_trls_side_of_the_grpo_benchmark_trains(quickstart: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.parquet")
    settings = {"model": str(quickstart / "model"), "prompts": str(tmp_path / "prompts.parquet")}
    settings |= {"output": str(tmp_path), "num_steps": 2, "group_size": 4, "num_samples": 8, "micro_batch_size": 4}
    (tmp_path / "job.json").write_text(json.dumps({**settings, "max_tokens": 8, "lr": 1e-6}))
    steps = steps_of("grpo_peer", tmp_path / "job.json")
    assert len(steps) == 2
    for step in steps:
        assert 0 < step["model_s"] and 0 < step["generation_s"]
        assert step["model_s"] + step["generation_s"] <= step["step_s"]
        assert 0 < step["tokens_mean"] <= 8
