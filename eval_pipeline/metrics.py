"""The figures of one data set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval_pipeline.engine import Answer
from eval_pipeline.verdict import ERROR_TYPES, Verdict

RAN = ("success", "wrong_answer")


def summarize(
    answers: Sequence[Answer], verdicts: Sequence[Verdict], elapsed_s: float
) -> dict[str, float | int | None]:
    """Sum up one data set.

    Args:
        answers: one for each problem, at least one.
        verdicts: the judgement on each answer, in the same order.
        elapsed_s: wall-clock seconds that answering and judging took, without loading the model.

    Returns:
        Figures by name. With n problems of which s succeeded:

        - `num_problems`: n
        - `exec_success_rate`: share of answers whose code ran (`success` or `wrong_answer`)
        - `accepted_at_1`: s / n
        - `pass_ratio_mean`, `_p50`, `_p90`: passed tests over tests, over the problems (linear interpolation)
        - `<error type>_rate`: share of each of the six error types
        - `avg_gen_tokens`: new tokens per answer
        - `avg_judge_time`: seconds of judging per answer
        - `throughput`: problems per second of `elapsed_s`
        - `truncation_rate`: share of answers cut off at the token limit
        - `cost_per_solved_tokens`, `cost_per_solved_judge_time`: new tokens, and seconds of judging, of the whole data
          set over s; None when nothing was solved

    Raises:
        ValueError: the two lists differ in length, or are empty.
    """
    if len(answers) != len(verdicts) or not answers:
        raise ValueError(f"{len(answers)} answers and {len(verdicts)} verdicts; one verdict for each answer is needed")
    rates = error_rates(verdicts)
    return {
        "num_problems": len(answers),
        "exec_success_rate": sum(verdict.error_type in RAN for verdict in verdicts) / len(verdicts),
        "accepted_at_1": rates["success_rate"],
        **_pass_ratios(verdicts),
        **rates,
        **_costs(answers, verdicts),
        "throughput": len(answers) / elapsed_s,
        "truncation_rate": float(np.mean([answer.truncated for answer in answers])),
    }


def error_rates(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """Share of each error type among the verdicts, 0 to 1, those that did not occur included."""
    kinds = [verdict.error_type for verdict in verdicts]
    return {f"{kind}_rate": kinds.count(kind) / len(kinds) for kind in ERROR_TYPES}


def _pass_ratios(verdicts: Sequence[Verdict]) -> dict[str, float]:
    ratios = [verdict.pass_ratio for verdict in verdicts]
    return {
        "pass_ratio_mean": float(np.mean(ratios)),
        "pass_ratio_p50": float(np.percentile(ratios, 50)),
        "pass_ratio_p90": float(np.percentile(ratios, 90)),
    }


def _costs(answers: Sequence[Answer], verdicts: Sequence[Verdict]) -> dict[str, float | None]:
    tokens = sum(answer.num_tokens for answer in answers)
    judge_s = sum(verdict.judge_s for verdict in verdicts)
    num_solved = sum(verdict.error_type == "success" for verdict in verdicts)
    return {
        "avg_gen_tokens": tokens / len(answers),
        "avg_judge_time": judge_s / len(verdicts),
        "cost_per_solved_tokens": tokens / num_solved if num_solved else None,
        "cost_per_solved_judge_time": judge_s / num_solved if num_solved else None,
    }
