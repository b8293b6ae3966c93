"""A learning rate that falls when a measurement stops getting better."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau


class PlateauSchedule(ReduceLROnPlateau):
    """torch's, in a loop that calls `step` after each update: only a measurement moves it.

    Args:
        optimizer: whose learning rate falls.
        factor: that it is multiplied by.
        patience: measurements without a greater reward before that.
    """

    def __init__(self, optimizer: Optimizer, factor: float, patience: int) -> None:
        super().__init__(optimizer, mode="max", factor=factor, patience=patience)

    def step(self, metrics: float | None = None, epoch: int | None = None) -> None:  # type: ignore[override]
        """Take a measurement; without one nothing happens."""
        if metrics is not None:
            super().step(metrics)
