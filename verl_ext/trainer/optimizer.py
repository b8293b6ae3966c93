"""Builds the optimizer and the learning-rate schedules with verl and torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor, ones
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from verl_ext.errors import UserError, first_line_of
from verl_ext.trainer.config import OptimConfig
from verl_ext.verl_api import (
    build_verl_optimizer,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)


def build_optimizer(model: torch.nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer of `optim.optimizer` over the trainable parameters.

    On GPUs it is fused if torch has such a kernel, because torch's default for DTensors is a loop over parameters.

    Raises:
        UserError: the optimizer does not exist, does not accept its arguments, or cannot update sharded parameters.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if config.runs_fused_on_gpus and all(parameter.is_cuda for parameter in trained):
        config = replace(config, override_optimizer_config={"fused": True, **(config.override_optimizer_config or {})})
    try:
        optimizer = build_verl_optimizer(trained, config)  # type: ignore[arg-type]  # verl's class has the same keys
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        reason = str(error).split(". Available")[0]  # verl appends a list of the whole module
        raise UserError(
            f"optim.optimizer={config.optimizer} of {config.optimizer_impl} cannot be built: {reason}; "
            "correct the optim section"
        ) from error
    sharded = next((each for each in trained if isinstance(each, DTensor)), None)
    if sharded is not None:
        _require_sharded_step(sharded, config)
    return optimizer


def _require_sharded_step(like: DTensor, config: OptimConfig) -> None:
    """Update a small parameter that is sharded like the model's: torch lacks some operations over DTensors.

    Raises:
        UserError: the update fails.
    """
    mesh = like.device_mesh
    parameter = torch.nn.Parameter(ones(mesh.size(), 2, dtype=like.dtype, device_mesh=mesh, placements=like.placements))
    parameter.grad = torch.ones_like(parameter)
    try:
        build_verl_optimizer([parameter], config).step()  # type: ignore[arg-type]
    except Exception as error:  # optimizers fail in different ways
        raise UserError(
            f"optim.optimizer={config.optimizer} of {config.optimizer_impl} cannot update sharded parameters "
            f"({first_line_of(error)}); use another optimizer, such as AdamW"
        ) from error


def build_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, num_steps: int, updates_per_step: int = 1
) -> LRScheduler:
    """Build the schedule of `optim.lr_scheduler` over `num_steps` updates.

    Args:
        config: `optim`; `lr_warmup_steps` takes precedence over `lr_warmup_steps_ratio`.
        updates_per_step: number of updates per step, for `lr_warmup_steps`.
    """
    warmup = config.lr_warmup_steps
    if warmup is None or warmup < 0:
        warmup = int(num_steps * config.lr_warmup_steps_ratio)
    else:
        warmup *= updates_per_step
    if config.lr_scheduler == "constant":
        return get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
    build = get_cosine_schedule_with_warmup if config.lr_scheduler == "cosine" else get_wsd_schedule_with_warmup
    return build(
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=num_steps,
        min_lr_ratio=config.min_lr_ratio or 0.0,
        num_cycles=config.num_cycles,
    )


class PlateauScheduler(ReduceLROnPlateau):
    """torch's scheduler, in a loop that calls `step` after each update; only validations change the learning rate.

    Args:
        patience: number of validations at the ends of epochs without a higher reward; after one more, the learning
            rate falls.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float, patience: int) -> None:
        # with torch's relative threshold, a negative reward that stays the same counts as a rise
        super().__init__(optimizer, mode="max", factor=factor, patience=patience, threshold_mode="abs")

    def step(self, metrics: float | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """Process the reward of a validation; without one, do nothing."""
        if metrics is not None:
            super().step(metrics)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the position and the learning rate; factor and patience remain those of this run."""
        super().load_state_dict({**state_dict, "factor": self.factor, "patience": self.patience})

    def forget_best(self) -> None:
        """Compare the next rewards with each other only."""
        self.best, self.num_bad_epochs = self.mode_worse, 0
