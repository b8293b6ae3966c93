"""Warm and cold starts compute bitwise identical results, and so do two warm servers with different hash seeds."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import evaluation, warm
from tests.helpers.checkpoints import assert_same_checkpoint
from tests.helpers.commands import GRPORun, SFTRun, TrainingRun

COLD = "cold"
STARTS = (COLD, *warm.HASH_SEEDS)
"""New processes, or the server with this hash seed."""
MEASURED = ("time/", "throughput/", "system/", "train/time(s)", "weights/sync_s")
"""Beginnings of the names of metrics that depend on the speed of the machine."""


@contextlib.contextmanager
def starting(start: str) -> Iterator[None]:
    """Start the command of the block in this way."""
    pids: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm, "on_start", [*warm.on_start, pids.append])
        if start == COLD:
            patch.setenv("TESTS_COLD", "1")
        else:
            patch.delenv("TESTS_COLD", raising=False)
            patch.setattr(warm.WarmProcess, "_turn", itertools.repeat(warm.HASH_SEEDS.index(start)))
        yield
    assert len(pids) == (start != COLD), "the number of warm starts"


def computed(run: TrainingRun) -> list[dict[str, Any]]:
    """The rows of `metrics.jsonl` without times and values derived from them."""
    rows = [
        {name: value for name, value in row.items() if name != "time" and not name.startswith(MEASURED)}
        for row in run.rows()
    ]
    return [row for row in rows if row.keys() > {"step", "attempt"}]


def assert_all_same(runs: Mapping[str, TrainingRun], last_step: int) -> None:
    """Run a command with each way to start; assert equal metrics and last checkpoint."""
    for start, run in runs.items():
        with starting(start):
            run.finish()
    expected, last = computed(runs[COLD]), f"global_step_{last_step}"
    assert {row["step"] for row in expected} >= set(range(1, last_step + 1))
    for start, run in runs.items():
        assert computed(run) == expected, start
        assert_same_checkpoint(run.run_dir / last, runs[COLD].run_dir / last)


def test_sft_results_are_identical(quickstart: Path, tmp_path: Path) -> None:
    validating = ("trainer.test_freq=2", "trainer.val_before_train=true")
    runs = {start: SFTRun(quickstart, tmp_path / start, *validating) for start in STARTS}
    assert_all_same(runs, 6)


@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_grpo_results_are_identical(engine: str, quickstart: Path, tmp_path: Path) -> None:
    runs = {start: GRPORun(quickstart, tmp_path / start, f"rollout.engine={engine}") for start in STARTS}
    assert_all_same(runs, 4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_evaluation_results_are_identical(
    temperature: float, quickstart: Path, sft_run: SFTRun, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"datasets: {{some: {{format: quickstart, path: {quickstart}/problems.jsonl, limit: 12}}}}\n"
        f"tiers: {{tier1: [some]}}\nsampling: {{max_tokens: 32, temperature: {temperature}}}\nwandb: false\n"
    )
    export = sft_run.last_checkpoint / "huggingface"
    answers, verdicts = {}, {}
    for start in STARTS:
        with starting(start):
            done = evaluation.evaluate("run", "--checkpoint", export, "--output", tmp_path / start, "--recipe", recipe)
        assert done.returncode == 0, done.stderr
        [file] = (tmp_path / start / "work" / "some").glob("answers-*.jsonl")
        answers[start] = file.read_bytes()
        rows = evaluation.read_lines(tmp_path / start / "verdicts" / "some.jsonl")
        verdicts[start] = [(row["problem_id"], row["error_type"], row["pass_ratio"]) for row in rows]
    assert len(verdicts[COLD]) == 12
    for start in STARTS:
        assert answers[start] == answers[COLD], start
        assert verdicts[start] == verdicts[COLD], start
