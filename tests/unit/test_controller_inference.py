"""Inference with a controller: encodings per decision, decision cost, and the traced network."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from tests.helpers import vlms
from tests.helpers.data import question
from verl_ext.controller.adapters import VLMAdapter, adapter_for
from verl_ext.controller.distribution import ConfigurationDistribution
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.inference import AdaptiveModel, Decision, TracedController, decision_ms_of
from verl_ext.controller.network import BudgetController, BudgetControllerConfig

SIZES = (1024, 4096, 9216)


def tiny_adapter() -> VLMAdapter:
    return adapter_for(*vlms.qwen3_vl_moe(), SIZES)


def controller_of(adapter: VLMAdapter, preferred_tier: int) -> BudgetController:
    """A controller that always chooses this tier."""
    controller = BudgetController(BudgetControllerConfig(**vars(adapter.space(2, 4, (1, 2, 4))), **WIDTHS))
    torch.manual_seed(0)
    with torch.no_grad():
        controller.block_head.weight.normal_()
        controller.topk_head.weight.normal_()
        controller.tier_head.bias[preferred_tier] = 9.0
    return controller


def model(preferred_tier: int) -> AdaptiveModel:
    """A model whose controller always chooses this tier."""
    adapter = tiny_adapter()
    return AdaptiveModel(VLMRunner(adapter, max_new_tokens=3), controller_of(adapter, preferred_tier))


WIDTHS = {"vision_width": 32, "language_width": 32, "low_ms": 5.0, "high_ms": 50.0, "vlm": {}}


@pytest.mark.parametrize("tier", [0, 2])
def test_image_is_encoded_once_per_needed_tier(tier: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget_ms": math.nan}, "budget_ms is nan; it must be a positive number"),
        ({"budget_ms": "30"}, "budget_ms is '30'; it must be a positive number"),
        ({"question": " "}, "question is ' '; it must be text that is not empty"),
        ({"question": None}, "question is None"),
        ({"question": "what is <|image_pad|> ?"}, r"the question contains <\|image_pad\|>"),
        ({"image": Image.new("RGB", (0, 0))}, "the image is 0x0 pixels, so it is empty"),
        ({"image": Image.new("RGB", (1001, 5))}, "the image is 1001x5 pixels, an aspect ratio of 200"),
    ],
)
def test_invalid_arguments_of_answer_are_rejected(changes: dict[str, Any], message: str) -> None:
    arguments = {"image": question(1).load_image(), "question": question(1).question, "budget_ms": np.float32(20)}
    adaptive = model(0)
    assert adaptive.answer(**arguments).total_ms > 0
    with pytest.raises(ValueError, match=message):
        adaptive.answer(**{**arguments, **changes})


def test_chosen_configuration_is_the_mode() -> None:
    controller, sample = controller_of(adapter := tiny_adapter(), 1), question(2)
    adaptive = AdaptiveModel(VLMRunner(adapter, max_new_tokens=3), controller)
    vision, language = adaptive.runner.features(sample)
    for budget in (5.0, 50.0, 5.0):
        logits = controller(vision[None], language[None], torch.tensor([budget]))
        chosen = ConfigurationDistribution(controller.space, *logits).mode()
        [expected] = chosen.configurations(controller.space)
        assert adaptive.answer(sample.load_image(), sample.question, budget).configuration == expected


def test_decision_time_includes_unused_encoding() -> None:
    space = model(0).runner.adapter.space(2, 4, (1, 2, 4))
    low, high = (Decision(space.configuration(tier, [True] * 4), 1.0, 2.0, 4.0) for tier in (0, 2))
    assert decision_ms_of(low.configuration, low.deciding_ms, 100.0) == 7.0
    assert decision_ms_of(high.configuration, high.deciding_ms, 100.0) == 107.0


# The traced network


def traceable_controller(topk_choices: tuple[int, ...]) -> BudgetController:
    torch.manual_seed(0)
    sizes = {"num_blocks": 6, "min_active": 2, "max_active": 6, "topk_choices": topk_choices}
    widths = {"vision_width": 24, "language_width": 16, "hidden": 32, "low_ms": 5.0, "high_ms": 50.0}
    found = BudgetController(BudgetControllerConfig(**sizes, **widths)).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(std=0.3)
    return found


@pytest.mark.parametrize("topk_choices", [(), (1, 2, 4)])
def test_traced_logits_equal_eager_logits(topk_choices: tuple[int, ...]) -> None:
    network = traceable_controller(topk_choices)
    traced = TracedController(network)
    with torch.inference_mode():
        for budget in (5.0, 31.5, 50.0, 5.0):
            vision, language = torch.randn(1, 24), torch.randn(1, 16)
            expected = network(vision, language, torch.tensor([budget]))
            found = traced(vision, language, budget)
            assert [each.shape for each in found] == [each.shape for each in expected]
            assert_close(found, expected)
    assert expected[1].std() > 0.1  # they differ by block, so that equal logits mean something


def test_budget_features_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    network = traceable_controller((1, 2))
    traced, asked = TracedController(network), []
    made = network.budget_features
    monkeypatch.setattr(network, "budget_features", lambda budgets: asked.extend(budgets.tolist()) or made(budgets))
    with torch.inference_mode():
        for budget in (20.0, 30.0, 20.0, 30.0):
            traced(torch.zeros(1, 24), torch.zeros(1, 16), budget)
    assert asked == [20.0, 30.0]
