"""The search for the blocks of static configurations."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from tests.helpers import vlms
from tests.helpers.data import question
from verl_ext.controller.adapters import adapter_for
from verl_ext.controller.evaluation.statics import search_blocks
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.space import Configuration
from verl_ext.data.image_questions import ImageQuestion

FIRST, LAST = [True, False, False, False], [True, False, False, True]


@pytest.fixture(scope="module")
def runner() -> VLMRunner:
    return VLMRunner(adapter_for(*vlms.qwen3_vl_moe(), (1024, 4096)), max_new_tokens=3)


def at_high_tier(runner: VLMRunner, *active: int) -> Configuration:
    return runner.adapter.space(1, 4, (1, 2, 4)).configuration(1, [block in active for block in range(4)])


def answered(runner: VLMRunner, *active: int) -> list[ImageQuestion]:
    """Questions whose references are the answers of these blocks."""
    asked, way = [question(number) for number in range(4)], at_high_tier(runner, *active)
    return [replace(each, references=(runner.run(each, way).answer or "none",)) for each in asked]


def test_search_adds_block_with_most_correct_answers(runner: VLMRunner) -> None:
    samples, space = answered(runner, 0, 3), runner.adapter.space(1, 4, (1, 2, 4))
    answers = [[runner.run(each, at_high_tier(runner, 0, block)).answer for each in samples] for block in (1, 2)]
    assert all(answer != each.references[0] for found in answers for answer, each in zip(found, samples))
    found = search_blocks(runner, space, samples)
    assert found[1] == FIRST and found[2] == LAST and found[4] == [True] * 4
    few = search_blocks(runner, runner.adapter.space(2, 3, (1, 2, 4)), samples)
    assert few == {count: found[count] for count in (2, 3)}


def test_search_breaks_ties_by_loss(runner: VLMRunner) -> None:
    space = runner.adapter.space(2, 2, (1, 2, 4))
    samples = [replace(each, references=("no model says this",)) for each in answered(runner, 0)]

    def loss(block: int) -> float:
        way = at_high_tier(runner, 0, block)
        return fmean(runner.reference_loss(each, way) for each in samples)

    least = min((1, 2, 3), key=loss)
    assert len({loss(block) for block in (1, 2, 3)}) == 3
    assert search_blocks(runner, space, samples) == {2: [block in (0, least) for block in range(4)]}
