"""Hostile answers are contained and judged, and leave nothing behind."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from eval_pipeline.judge import JudgeClient
from tests.helpers.hostile_answers import FUNCTIONS, PROGRAMS
from tests.helpers.judge import HOSTILE_LIMITS, check_hostile, check_hostile_at_once, serving

AT_ONCE = random.Random(26).sample([*FUNCTIONS, *PROGRAMS], 30)


@pytest.fixture(scope="module")
def server() -> Iterator[JudgeClient]:
    """A server with namespaces."""
    with serving("bwrap", 2, HOSTILE_LIMITS) as server:
        yield server


@pytest.mark.parametrize("name", [*FUNCTIONS, *PROGRAMS])
def test_hostile_answer_is_contained(server: JudgeClient, name: str) -> None:
    check_hostile(server, name)


def test_60_answers_at_once_get_correct_verdicts() -> None:
    check_hostile_at_once(AT_ONCE, num_pairs=30)
