"""Engines: hanging processes, generations longer than a step may take, and updated weights of further architectures."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from eval_pipeline.config import EngineConfig
from eval_pipeline.engines import EngineDied, GenerateRequest
from eval_pipeline.worker import open_engine
from tests.helpers.engines import LONG, REQUESTS, answer_all, make_export, vllm_processes
from tests.helpers.grpo_reference import assert_engines_follow_weights


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    return make_export(tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("has_been_asked", [True, False])
def test_hanging_process_is_killed(has_been_asked: bool, export: Path) -> None:
    # more than the connection buffers
    many = [GenerateRequest(f"p{i}", f"{i} " + "x" * 400) for i in range(4000)]
    with open_engine(EngineConfig(dtype="float32", timeout_s=4), export) as engine:
        [child] = vllm_processes(psutil.Process())
        if not has_been_asked:
            child.suspend()
        with pytest.raises(EngineDied, match=r"4 s \(engine.timeout_s\)"):
            for _ in engine.answers(REQUESTS if has_been_asked else many, LONG):
                child.suspend()
        assert not child.is_running()


def test_experts_and_tied_weights_follow_updates(quickstart: Path, tmp_path: Path) -> None:
    assert_engines_follow_weights(quickstart, tmp_path, ["experts", "tied"])


def test_generation_may_exceed_step_timeout(export: Path) -> None:
    number = 32
    with open_engine(EngineConfig(dtype="float32", timeout_s=3), export) as engine:
        while engine.seconds["generate_s"] < 4:  # however fast the machine is
            engine.seconds["generate_s"] = 0.0
            # all of the same length, so that none is finished before the last step
            answer_all(engine, [GenerateRequest(str(i), "x") for i in range(number)], LONG)
            number *= 2
