"""A trained controller for one question at a time, without what Python takes between its operations."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from verl_ext.controller.execution import LastUsed
from verl_ext.controller.network import BudgetController

MOST_BUDGETS = 256
"""Budgets whose features are kept; a service has a few, and those of one are half a kilobyte."""
WARM_UPS = 3
"""Runs in which torch's interpreter settles on how it runs a traced network; the first two are slow."""

Logits = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Decider(nn.Module):
    """The part of a controller that depends on the question; `torch.jit` traces the `forward` of a module."""

    def __init__(self, controller: BudgetController) -> None:
        super().__init__()
        self._controller = controller

    def forward(self, vision: torch.Tensor, language: torch.Tensor, budget: torch.Tensor) -> Logits:
        """See `BudgetController.logits`."""
        return self._controller.logits(vision, language, budget)


class TracedController:
    """The logits of a controller whose weights do not change any more.

    A controller is so small that most of its time passes between its operations, not in them: the network runs as one
    traced graph, and the features of a budget, which no question changes, are kept.

    Args:
        controller: in evaluation mode, on the device that it runs on.
    """

    def __init__(self, controller: BudgetController) -> None:
        self._controller, self._device = controller, next(controller.parameters()).device
        self._budgets: LastUsed[torch.Tensor] = LastUsed(MOST_BUDGETS)
        config = controller.config
        widths = config.vision_width, config.language_width
        vision, language = (torch.zeros(1, width, device=self._device) for width in widths)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            example = vision, language, self._of_budget(config.low_ms)
            self._network = torch.jit.optimize_for_inference(torch.jit.trace(_Decider(controller).eval(), example))
            for _ in range(WARM_UPS):
                self._network(*example)

    def __call__(self, vision: torch.Tensor, language: torch.Tensor, budget_ms: float) -> Logits:
        """Logits as of `BudgetController.forward`, for a batch of one; to be called in inference mode.

        Args:
            vision: (1, vision_width), float32.
            language: (1, language_width), float32.
            budget_ms: milliseconds.
        """
        return self._network(vision, language, self._of_budget(budget_ms))

    def _of_budget(self, budget_ms: float) -> torch.Tensor:
        make = lambda: self._controller.budget_features(torch.tensor([budget_ms], device=self._device))  # noqa: E731
        return self._budgets.get(budget_ms, make)
