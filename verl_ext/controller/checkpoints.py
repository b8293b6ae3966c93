"""Loads a controller's weights, from an export or from a file as users of the older code have them."""

from __future__ import annotations

from pathlib import Path

import torch

from verl_ext.controller.network import BudgetController
from verl_ext.errors import UserError, first_line_of

STATE = "one_stage_controller_state_dict"
"""Under which a `.pt` file has the weights."""


def load_weights(controller: BudgetController, path: Path) -> None:
    """Load the weights of an export, or of a `best_model.pt`, into a controller of the same size.

    Raises:
        UserError: there is no such file, or it is another controller's.
    """
    try:
        if path.is_dir():
            weights = BudgetController.from_pretrained(path).state_dict()
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)[STATE]
        controller.load_state_dict(weights)
    except Exception as error:  # a damaged file raises an exception of its own kind
        raise UserError(
            f"controller.init_from={path} is no controller of this size ({first_line_of(error)}); give a best_model.pt "
            "that was trained for this model and these knobs"
        ) from error
