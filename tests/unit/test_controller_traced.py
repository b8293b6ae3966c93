"""A traced controller gives what the controller itself gives."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from verl_ext.controller.inference import TracedController
from verl_ext.controller.network import BudgetController, BudgetControllerConfig


def controller(topk_choices: tuple[int, ...]) -> BudgetController:
    torch.manual_seed(0)
    sizes = {"num_blocks": 6, "min_active": 2, "max_active": 6, "topk_choices": topk_choices}
    widths = {"vision_width": 24, "language_width": 16, "hidden": 32, "low_ms": 5.0, "high_ms": 50.0}
    found = BudgetController(BudgetControllerConfig(**sizes, **widths)).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_(std=0.3)
    return found


@pytest.mark.parametrize("topk_choices", [(), (1, 2, 4)])
def test_its_logits_are_the_controllers(topk_choices: tuple[int, ...]) -> None:
    network = controller(topk_choices)
    traced = TracedController(network)
    with torch.inference_mode():
        for budget in (5.0, 31.5, 50.0, 5.0):
            vision, language = torch.randn(1, 24), torch.randn(1, 16)
            expected = network(vision, language, torch.tensor([budget]))
            found = traced(vision, language, budget)
            assert [each.shape for each in found] == [each.shape for each in expected]
            assert_close(found, expected)
    assert expected[1].std() > 0.1  # they differ by block, so that equal logits mean something


def test_the_features_of_a_budget_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network = controller((1, 2))
    traced, asked = TracedController(network), []
    made = network.budget_features
    monkeypatch.setattr(network, "budget_features", lambda budgets: asked.extend(budgets.tolist()) or made(budgets))
    with torch.inference_mode():
        for budget in (20.0, 30.0, 20.0, 30.0):
            traced(torch.zeros(1, 24), torch.zeros(1, 16), budget)
    assert asked == [20.0, 30.0]
