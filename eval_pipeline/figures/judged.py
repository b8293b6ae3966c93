"""One judged answer, which all figures are made from."""

from __future__ import annotations

from dataclasses import dataclass

from eval_pipeline.engines.answer import Answer
from eval_pipeline.judge import Verdict
from eval_pipeline.problems.problem import Problem


@dataclass(frozen=True)
class Judged:
    """One answer to one problem, with its verdict."""

    problem: Problem
    sample: int
    answer: Answer
    program: str
    """What was judged: the code found in the answer, or the answer itself."""
    verdict: Verdict
