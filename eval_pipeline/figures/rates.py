"""Which answers each rate counts, and a data set's answers in rows of one problem each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.figures.judged import Judged
from eval_pipeline.judge import ERROR_TYPES, ErrorType

RAN: tuple[ErrorType, ...] = ("success", "wrong_answer")
"""Error types of answers whose code ran to its end."""
SOLVED: tuple[ErrorType, ...] = ("success",)


def _ended_as(kinds: Collection[ErrorType]) -> Callable[[Judged], bool]:
    return lambda judged: judged.verdict.error_type in kinds


RATES: dict[str, Callable[[Judged], bool]] = {
    "exec_success_rate": _ended_as(RAN),
    "accepted_at_1": _ended_as(SOLVED),
    **{f"{kind}_rate": _ended_as((kind,)) for kind in ERROR_TYPES},
    "truncation_rate": lambda judged: judged.answer.truncated,
}
"""Name of each rate, and whether an answer counts towards it."""


def rows_of_problems(judged: Sequence[Judged]) -> list[list[Judged]]:
    """The answers, a row for each problem in the order in which the problems first occur, samples in their order.

    Raises:
        ValueError: there are none, one occurs twice, or the problems have different numbers of answers; a mean over
            answers would then weigh some problems more than others.
    """
    rows: dict[str, dict[int, Judged]] = {}
    for one in judged:
        row = rows.setdefault(one.problem.problem_id, {})
        if one.sample in row:
            raise ValueError(f"answer {one.sample} to problem {one.problem.problem_id!r} occurs twice")
        row[one.sample] = one
    sizes = {len(row) for row in rows.values()}
    if len(sizes) != 1:
        raise ValueError(f"every problem needs the same number of answers, at least one, not {sorted(sizes)}")
    return [[row[sample] for sample in sorted(row)] for row in rows.values()]


def shares(rows: Sequence[Sequence[Judged]], counts: Callable[[Judged], bool]) -> NDArray[np.float64]:
    """Share of each problem's answers that count, 0 to 1, of shape (problem,)."""
    return np.array([[counts(one) for one in row] for row in rows], dtype=float).mean(axis=1)
