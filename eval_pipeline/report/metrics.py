"""Metrics of a dataset, computed from its judged answers, with 95% confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import norm, t

from eval_pipeline.engines import GeneratedAnswer
from eval_pipeline.judge import ERROR_TYPES, ErrorType, Verdict
from eval_pipeline.problems.problem import Problem

CONFIDENCE = 0.95
WANTED_K = (1, 5, 10)
RAN: tuple[ErrorType, ...] = ("success", "wrong_answer")
"""Error types of answers whose code ran to completion."""
CODE_METRIC = "exec_success_rate"
"""The rate of `RAN`. It is 1 if answers are judged without being run."""
SOLVED: tuple[ErrorType, ...] = ("success",)

Metrics = Mapping[str, float | int | None]
"""Value by metric name; None if the value is undefined."""
Interval = tuple[float, float]
Intervals = Mapping[str, Interval]
"""Interval by metric name."""

_Z = float(norm.ppf(0.5 + CONFIDENCE / 2))


@dataclass(frozen=True)
class JudgedAnswer:
    """An answer to a problem, with its verdict."""

    problem: Problem
    sample: int
    answer: GeneratedAnswer
    verdict: Verdict


def _has_error_type(kinds: Collection[ErrorType]) -> Callable[[JudgedAnswer], bool]:
    return lambda judged: judged.verdict.error_type in kinds


RATES: dict[str, Callable[[JudgedAnswer], bool]] = {
    "exec_success_rate": _has_error_type(RAN),
    "accepted_at_1": _has_error_type(SOLVED),
    **{f"{kind}_rate": _has_error_type((kind,)) for kind in ERROR_TYPES},
    "truncation_rate": lambda judged: judged.answer.truncated,
}
"""Name of each rate, and whether an answer counts toward it."""


def summarize(judged: Sequence[JudgedAnswer], elapsed_s: float) -> dict[str, float | int | None]:
    """Compute the metrics of a dataset.

    Args:
        judged: at least one answer per problem, and the same number for each.
        elapsed_s: wall-clock seconds of generation and judging, without loading the model.

    Returns:
        Metrics by name, in order of `metrics.json`; the evaluation guide defines them. Pass ratios are averaged over
        a problem's answers first. Costs are None without a correct answer, and `throughput` if no time has elapsed.
        `num_samples` and `pass_at_<k>` are included with several answers per problem.

    Raises:
        ValueError: no answers, or not the same number for each problem.
    """
    rows = rows_of_problems(judged)
    rates = {name: float(np.mean(shares(rows, counts))) for name, counts in RATES.items()}
    truncation_rate = rates.pop("truncation_rate")
    headline = {name: rates.pop(name) for name in ("exec_success_rate", "accepted_at_1")}
    passed = {name: float(np.mean(values)) for name, values in pass_at_k_of_problems(rows).items()}
    return {
        "num_problems": len(rows),
        **headline,
        **({"num_samples": len(rows[0]), **passed} if passed else {}),
        **_pass_ratios(rows),
        **rates,
        **_costs(judged),
        "throughput": len(rows) / elapsed_s if elapsed_s > 0 else None,
        "truncation_rate": truncation_rate,
    }


def rows_of_problems(judged: Sequence[JudgedAnswer]) -> list[list[JudgedAnswer]]:
    """Group answers by problem, in the order in which problems first occur; samples are sorted.

    Raises:
        ValueError: no answers, a duplicate, or different numbers of answers per problem; a mean over answers would
            then weight some problems more than others.
    """
    rows: dict[str, dict[int, JudgedAnswer]] = {}
    for one in judged:
        row = rows.setdefault(one.problem.problem_id, {})
        if one.sample in row:
            raise ValueError(f"answer {one.sample} to problem {one.problem.problem_id!r} occurs twice")
        row[one.sample] = one
    sizes = {len(row) for row in rows.values()}
    if len(sizes) != 1:
        raise ValueError(f"every problem needs the same number of answers, at least one, not {sorted(sizes)}")
    return [[row[sample] for sample in sorted(row)] for row in rows.values()]


def shares(rows: Sequence[Sequence[JudgedAnswer]], counts: Callable[[JudgedAnswer], bool]) -> NDArray[np.float64]:
    """Share of each problem's answers that count, 0 to 1, of shape (problem,)."""
    return np.array([[counts(one) for one in row] for row in rows], dtype=float).mean(axis=1)


def _pass_ratios(rows: Sequence[Sequence[JudgedAnswer]]) -> dict[str, float]:
    ratios = [np.mean([one.verdict.pass_ratio for one in row]) for row in rows]
    return {
        "pass_ratio_mean": float(np.mean(ratios)),
        "pass_ratio_p50": float(np.percentile(ratios, 50)),
        "pass_ratio_p90": float(np.percentile(ratios, 90)),
    }


def _costs(judged: Sequence[JudgedAnswer]) -> dict[str, float | None]:
    tokens = sum(one.answer.num_tokens for one in judged)
    judge_s = sum(one.verdict.judge_time for one in judged)
    num_correct = sum(map(RATES["accepted_at_1"], judged))
    return {
        "avg_gen_tokens": tokens / len(judged),
        "avg_judge_time": judge_s / len(judged),
        "cost_per_solved_tokens": tokens / num_correct if num_correct else None,
        "cost_per_solved_judge_time": judge_s / num_correct if num_correct else None,
    }


# pass@k


def wanted_k(num_samples: int) -> list[int]:
    """The k of the reported pass@k with this many answers per problem; empty with one answer."""
    return sorted(k for k in {*WANTED_K, num_samples} if k <= num_samples) if num_samples > 1 else []


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate for one problem: 1 - C(n - c, k) / C(n, k).

    The product of ratios below 1 avoids the overflow of the binomial coefficients.

    Args:
        num_samples: n, number of answers.
        num_correct: c, number of correct answers.
        k: number of attempts, 1 to n.

    Source:
        Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1 and figure 3.
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_correct} correct answers of {num_samples}")
    if num_samples - num_correct < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_correct + 1, num_samples + 1)))


def pass_at_k_of_problems(rows: Sequence[Sequence[JudgedAnswer]]) -> dict[str, list[float]]:
    """`pass_at_<k>` of each problem; empty with one answer per problem.

    Args:
        rows: answers by (problem, sample).
    """
    num_samples = len(rows[0])
    num_correct = [sum(map(RATES["accepted_at_1"], row)) for row in rows]
    return {
        f"pass_at_{k}": [pass_at_k(num_samples, correct, k) for correct in num_correct] for k in wanted_k(num_samples)
    }


# Confidence intervals: how far a rate could be off if other problems had been sampled


def rate_intervals(judged: Sequence[JudgedAnswer]) -> dict[str, Interval]:
    """Interval of every rate of a dataset, and of pass@k with several answers per problem.

    With one answer per problem these are Wilson's intervals. Several answers to one problem are correlated, so they
    carry less information than answers to different problems; `wilson_clustered` treats problems as clusters.

    Args:
        judged: at least one answer per problem, and the same number for each.
    """
    rows = rows_of_problems(judged)
    of_problems = {name: shares(rows, counts) for name, counts in RATES.items()} | pass_at_k_of_problems(rows)
    return {name: wilson_clustered(values, len(rows[0])) for name, values in of_problems.items()}


def wilson(k: float, n: float) -> Interval:
    """Wilson's score interval of a rate, without continuity correction.

    Args:
        k: number of hits; a fraction if n is an effective number.
        n: number of trials, above 0.

    Source:
        Wilson 1927, Probable Inference, the Law of Succession, and Statistical Inference, JASA 22(158).
    """
    rate = k / n
    center = (rate + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(rate * (1 - rate) / n + _Z**2 / (4 * n**2))
    # at 0 and 1, rounding would put a bound slightly inside the rate
    return min(max(center - half, 0.0), rate), max(min(center + half, 1.0), rate)


def wilson_clustered(shares_of_problems: ArrayLike, num_samples: int) -> Interval:
    """Wilson's interval with the effective number of answers instead of their number.

    The effective number is the number of independent answers with the observed variance between problems,
    p (1 - p) / Var(p), times (z / t)² because this variance is itself an estimate. It is bounded by the number of
    problems (if a problem's answers are all alike) and the number of answers (if they are independent). If all problems
    have the same share, there is no variance, and the number of problems is used.

    Args:
        shares_of_problems: share of each problem's answers that count, 0 to 1, of shape (problem,).
        num_samples: answers per problem.

    Source:
        Kish 1965, Survey Sampling (design effect); Korn and Graubard 1998, Survey Methodology 24(2) (degrees of
        freedom); Dean and Pagano 2015, J. Survey Statistics and Methodology 3(4) (Wilson's among the best of these).
    """
    values = np.asarray(shares_of_problems, dtype=float)
    num_problems, rate = len(values), float(np.mean(values))
    effective = float(num_problems)
    variance = float(np.var(values, ddof=1)) / num_problems if num_problems > 1 else 0.0
    if num_samples > 1 and variance > 0:
        small_sample = (_Z / float(t.ppf(0.5 + CONFIDENCE / 2, num_problems - 1))) ** 2
        observed = small_sample * rate * (1 - rate) / variance
        effective = min(max(observed, num_problems), num_problems * num_samples)
    return wilson(rate * effective, effective)
