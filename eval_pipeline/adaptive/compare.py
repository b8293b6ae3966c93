"""The whole comparison: what was measured, what the methods make of it, what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.adaptive.baselines import lookup_table, oracle, pareto_front
from eval_pipeline.adaptive.measure import DECIDING, Measured
from eval_pipeline.adaptive.results import Results, Row, rows_of
from eval_pipeline.adaptive.summary import Summary, summarise
from verl_ext.controller.space import Configuration


@dataclass(frozen=True)
class Comparison:
    """Of the methods.

    Attributes:
        budgets_ms: ascending.
        statics: static configurations, the columns of `measured.statics` and `measured.train`.
        measured: what was run.
        methods: by name (samples, budgets).
        front: places in `statics` of the Pareto front, from the quickest on.
        table: places in `statics`, one for each budget.
        summary: of it all.
    """

    budgets_ms: Sequence[float]
    statics: Sequence[Configuration]
    measured: Measured
    methods: dict[str, Results]
    front: list[int]
    table: list[int]
    summary: Summary

    @property
    def rows(self) -> list[Row]:
        """One for each method and budget."""
        return [row for name, results in self.methods.items() for row in rows_of(name, results, self.budgets_ms)]

    def violation_rates(self, method: str) -> NDArray[np.float64]:
        """(budgets,), the share of a method's answers that are too late."""
        return self.methods[method].violations(self.budgets_ms).mean(0)


def compare(measured: Measured, statics: Sequence[Configuration], budgets_ms: Sequence[float]) -> Comparison:
    """Make the methods' results of what was measured.

    Args:
        measured: what was run.
        statics: the columns of its statics.
        budgets_ms: its budgets.
    """
    table = lookup_table(measured.train, budgets_ms)
    # the oracle need not decide, so the controller's choices are among what it has without what deciding took
    methods = {
        "controller": measured.chosen.later(measured.deciding[..., 0]),
        "lookup_table": measured.statics.columns(table),
        "oracle": oracle(measured.statics.beside(measured.chosen), budgets_ms),
        "random": measured.drawn,
        "full": measured.full.columns([0] * len(budgets_ms)),
    }
    deciding = dict(zip(DECIDING, measured.deciding.mean((0, 1)).tolist()))
    summary = summarise(methods, budgets_ms, deciding, measured.full_ms, measured.share_again)
    return Comparison(budgets_ms, statics, measured, methods, pareto_front(measured.statics), table, summary)
