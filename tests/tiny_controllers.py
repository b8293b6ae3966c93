"""Exports of controllers that nobody trained, for a tiny model on disk."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_ext.controller.controlled import ControlledModel
from verl_ext.controller.loading import fingerprint, load_adapter
from verl_ext.controller.network import BudgetController, BudgetControllerConfig

TIERS = (1024, 4096, 9216)
BUDGETS_MS = (30.0, 60.0)
SUFFIX = "\nShort:"


def write_controller(folder: Path, model: Path, suffix: str = SUFFIX) -> Path:
    """An export for a model of `tests.tiny_questions`, with large random weights, so that choices differ."""
    adapter = load_adapter(str(model), TIERS)
    vlm = ControlledModel(str(model), TIERS, 3, suffix, False, fingerprint(adapter.model)).to_dict()
    knobs = {**vars(adapter.space(2, 4, (1, 2, 4))), "low_ms": BUDGETS_MS[0], "high_ms": BUDGETS_MS[1]}
    torch.manual_seed(3)
    controller = BudgetController(BudgetControllerConfig(**knobs, vision_width=32, language_width=32, vlm=vlm))
    for parameter in controller.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    controller.save_pretrained(folder)
    return folder
