"""Which blocks the static configurations of a comparison keep."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from eval_pipeline.adaptive.block_search import best_blocks
from tests import tiny_vlms
from tests.unit.test_controller_policy import question
from verl_ext.controller.adapters.registry import adapter_of
from verl_ext.controller.execution import Executor
from verl_ext.controller.importance import answer_loss

ONLY_LAST = [True, False, False, True]


def test_each_block_is_the_one_that_makes_the_references_likeliest() -> None:
    adapter = adapter_of(*tiny_vlms.qwen3_vl_moe(), (1024, 4096))
    space = adapter.space(1, 4, (1, 2, 4))
    executor = Executor(adapter, max_new_tokens=3)
    wanted = space.configuration(1, ONLY_LAST)
    asked = [question(number) for number in range(4)]
    samples = [replace(each, references=(executor.run(each, wanted).answer or "none",)) for each in asked]

    def loss(*active: int) -> float:
        configuration = space.configuration(1, [block in active for block in range(4)])
        encodings = [adapter.encode(adapter.inputs(each.opened(), each.question, 1)) for each in samples]
        return fmean(answer_loss(adapter, each, configuration, seen) for each, seen in zip(samples, encodings))

    found = best_blocks(adapter, space, samples)
    assert found[1] == [True, False, False, False] and found[2] == ONLY_LAST and found[4] == [True] * 4
    assert loss(0, 3) < min(loss(0, 1), loss(0, 2))
    assert found[3] == [True, loss(0, 1, 3) < loss(0, 2, 3), loss(0, 2, 3) <= loss(0, 1, 3), True]
    few = best_blocks(adapter, adapter.space(2, 3, (1, 2, 4)), samples)
    assert few == {count: found[count] for count in (2, 3)}
