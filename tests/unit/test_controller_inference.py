"""A controlled model as it is used: what it encodes, and what deciding counts for."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.helpers import vlms
from tests.helpers.data import question
from verl_ext.controller.adapters import adapter_for
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.distribution import ConfigurationDistribution
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.inference import AdaptiveModel, Decision, decision_overhead_ms
from verl_ext.controller.network import BudgetController, BudgetControllerConfig

SIZES = (1024, 4096, 9216)


def tiny_adapter() -> VLMAdapter:
    return adapter_for(*vlms.qwen3_vl_moe(), SIZES)


def controller_of(adapter: VLMAdapter, preferred_tier: int) -> BudgetController:
    """One that always takes this tier."""
    controller = BudgetController(BudgetControllerConfig(**vars(adapter.space(2, 4, (1, 2, 4))), **WIDTHS))
    torch.manual_seed(0)
    with torch.no_grad():
        controller.block_head.weight.normal_()
        controller.topk_head.weight.normal_()
        controller.tier_head.bias[preferred_tier] = 9.0
    return controller


def model(preferred_tier: int) -> AdaptiveModel:
    """One whose controller always takes this tier."""
    adapter = tiny_adapter()
    return AdaptiveModel(VLMRunner(adapter, max_new_tokens=3), controller_of(adapter, preferred_tier))


WIDTHS = {"vision_width": 32, "language_width": 32, "low_ms": 5.0, "high_ms": 50.0, "vlm": {}}


@pytest.mark.parametrize("tier", [0, 2])
def test_the_low_encoding_is_made_once_and_another_only_where_it_is_needed(
    tier: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adaptive, seen = model(tier), Counter()
    see = adaptive.runner.encode

    def counted(image: object, text: str, at: int) -> object:
        seen[at] += 1
        return see(image, text, at)

    monkeypatch.setattr(adaptive.runner, "encode", counted)
    sample = question(1)
    found = adaptive.answer(sample.load_image(), sample.question, 20.0)
    assert seen == Counter({0: 1, tier: 1}) and found.configuration.tier == tier
    assert found.answer == adaptive.runner.run(sample, found.configuration).answer
    assert found.total_ms == found.decision_ms + found.latency.total_ms and 0 < found.network_ms < found.decision_ms


def test_it_chooses_the_mode_for_image_question_and_budget() -> None:
    controller, sample = controller_of(adapter := tiny_adapter(), 1), question(2)
    adaptive = AdaptiveModel(VLMRunner(adapter, max_new_tokens=3), controller)
    vision, language = adaptive.runner.features(sample)
    for budget in (5.0, 50.0, 5.0):
        logits = controller(vision[None], language[None], torch.tensor([budget]))
        chosen = ConfigurationDistribution(controller.space, *logits).mode()
        [expected] = chosen.configurations(controller.space)
        assert adaptive.answer(sample.load_image(), sample.question, budget).configuration == expected


def test_deciding_costs_the_encoding_where_the_answer_does_not_use_it() -> None:
    space = model(0).runner.adapter.space(2, 4, (1, 2, 4))
    low, high = (Decision(space.configuration(tier, [True] * 4), 1.0, 2.0, 4.0) for tier in (0, 2))
    assert decision_overhead_ms(low.configuration, low.own_ms, 100.0) == 7.0
    assert decision_overhead_ms(high.configuration, high.own_ms, 100.0) == 107.0
