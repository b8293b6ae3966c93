"""Stops a run whose loss has stopped being a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from verl_ext.errors import UserError


class NonFiniteGuard:
    """Counts steps in a row without a finite loss and gradient; the caller leaves the weights alone on each of them.

    Args:
        limit: steps in a row after which the run stops.
        describe: names a sample by its number in the training set.
    """

    def __init__(self, limit: int, describe: Callable[[int], str]) -> None:
        self.limit, self.describe = limit, describe
        self.streak = 0
        self.num_skipped = 0

    def check(self, finite: bool, step: int, rows: Sequence[int]) -> None:
        """Count one step; collective when the limit is reached, so `finite` must be the same on every rank.

        Args:
            finite: whether loss and gradient norm are.
            step: the optimizer step, for the message.
            rows: this rank's samples of the step.

        Raises:
            UserError: the limit is reached; the message names the step and every rank's rows.
        """
        self.streak = 0 if finite else self.streak + 1
        self.num_skipped += not finite
        if self.streak >= self.limit:
            raise UserError(
                f"the loss or its gradient was not finite for {self.streak} steps in a row, the last at step {step}; look at "
                f"the batch ({self._name_rows(rows)}), lower optim.lr, or check the model's weights; "
                "no update was made on those steps and the last checkpoint is intact"
            )

    def _name_rows(self, rows: Sequence[int]) -> str:
        everyone: list[list[int]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, list(rows))
        return ", ".join(self.describe(row) for row in sorted({row for part in everyone for row in part}))
