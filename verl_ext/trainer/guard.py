"""Stops a run whose loss has stopped being a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verl_ext.collective import gather_results
from verl_ext.errors import UserError


class NonFiniteGuard:
    """Counts steps in a row without a finite loss and gradient; the caller leaves the weights alone on each of them.

    Args:
        limit: steps in a row after which the run stops.
        describe: names samples by their numbers in the training set.
    """

    def __init__(self, limit: int, describe: Callable[[Sequence[int]], str]) -> None:
        self.limit, self.describe = limit, describe
        self.streak = 0
        self.num_skipped = 0

    def count(self, finite: bool) -> None:
        """Count one step, by whether its loss and gradient norm are finite; the same on every rank."""
        self.streak = 0 if finite else self.streak + 1
        self.num_skipped += not finite

    def check(self, step: int, rows: Sequence[int]) -> None:
        """Stop the run when the limit is reached; collective then.

        Args:
            step: the optimizer step, for the message.
            rows: this rank's samples of the step.

        Raises:
            UserError: it names the step and every rank's rows.
        """
        if self.streak < self.limit:
            return
        everyone = gather_results(lambda: list(rows))
        raise UserError(
            f"the loss or its gradient was not finite for {self.streak} steps in a row, the last at step {step}; lower "
            "optim.lr, check the model's weights, or look at the batch: "
            f"{self.describe(sorted({row for part in everyone for row in part}))} "
            "(no update was made on those steps, and the last checkpoint is intact)"
        )
