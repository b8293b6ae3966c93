"""The figures of one data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from eval_pipeline.figures.judged import Judged
from eval_pipeline.figures.pass_at_k import pass_at_k_of_problems
from eval_pipeline.figures.rates import RATES, rows_of_problems, shares

Figures = Mapping[str, float | int | None]
"""Value by metric name; None where a figure does not exist."""


def summarize(judged: Sequence[Judged], elapsed_s: float) -> dict[str, float | int | None]:
    """Sum up one data set.

    Args:
        judged: the same number of answers to each problem, at least one.
        elapsed_s: wall-clock seconds that answering and judging took, without loading the model.

    Returns:
        Figures by name:

        - `num_problems`: how many were asked
        - `exec_success_rate`: share of answers whose code ran (`success` or `wrong_answer`)
        - `accepted_at_1`: share of answers that are `success`
        - `pass_ratio_mean`, `_p50`, `_p90`: passed tests over tests, averaged over a problem's answers, over the
          problems (linear interpolation)
        - `<error type>_rate`: share of answers of each of the six error types
        - `avg_gen_tokens`: new tokens per answer
        - `avg_judge_time`: seconds of judging per answer
        - `cost_per_solved_tokens`, `cost_per_solved_judge_time`: new tokens, and seconds of judging, of the whole data
          set over the number of right answers; None when there is none
        - `throughput`: problems per second of `elapsed_s`; None when that is 0
        - `truncation_rate`: share of answers cut off at the token limit
        - with several answers per problem also `num_samples`, how many, and `pass_at_<k>`

    Raises:
        ValueError: no answers, or not the same number for each problem.
    """
    rows = rows_of_problems(judged)
    rates = {name: float(np.mean(shares(rows, counts))) for name, counts in RATES.items()}
    truncation_rate = rates.pop("truncation_rate")
    leading = {name: rates.pop(name) for name in ("exec_success_rate", "accepted_at_1")}
    return {
        "num_problems": len(rows),
        **leading,
        **_of_samples(rows),
        **_pass_ratios(rows),
        **rates,
        **_costs(judged),
        "throughput": len(rows) / elapsed_s if elapsed_s > 0 else None,
        "truncation_rate": truncation_rate,
    }


def _of_samples(rows: Sequence[Sequence[Judged]]) -> dict[str, float | int]:
    passed = {name: float(np.mean(values)) for name, values in pass_at_k_of_problems(rows).items()}
    return {"num_samples": len(rows[0]), **passed} if passed else {}


def _pass_ratios(rows: Sequence[Sequence[Judged]]) -> dict[str, float]:
    ratios = [np.mean([one.verdict.pass_ratio for one in row]) for row in rows]
    return {
        "pass_ratio_mean": float(np.mean(ratios)),
        "pass_ratio_p50": float(np.percentile(ratios, 50)),
        "pass_ratio_p90": float(np.percentile(ratios, 90)),
    }


def _costs(judged: Sequence[Judged]) -> dict[str, float | None]:
    tokens = sum(one.answer.num_tokens for one in judged)
    judge_s = sum(one.verdict.judge_time for one in judged)
    num_right = sum(map(RATES["accepted_at_1"], judged))
    return {
        "avg_gen_tokens": tokens / len(judged),
        "avg_judge_time": judge_s / len(judged),
        "cost_per_solved_tokens": tokens / num_right if num_right else None,
        "cost_per_solved_judge_time": judge_s / num_right if num_right else None,
    }
