"""pass@k: the chance that at least one of k answers to a problem is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eval_pipeline.figures.judged import Judged
from eval_pipeline.figures.rates import RATES

WANTED_K = (1, 5, 10)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate for one problem: 1 - C(n - c, k) / C(n, k).

    Computed as a product of ratios below 1, where the binomial coefficients would overflow.

    Args:
        num_samples: n, answers drawn.
        num_right: c, those that were right.
        k: answers one would be allowed, 1 to n.

    Source:
        Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv:2107.03374, equation 1 and figure 3.
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(f"pass@{k} cannot be estimated from {num_right} right answers of {num_samples}")
    if num_samples - num_right < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(num_samples - num_right + 1, num_samples + 1)))


def pass_at_k_of_problems(rows: Sequence[Sequence[Judged]]) -> dict[str, list[float]]:
    """`pass_at_<k>` of each problem, for k of 1, 5, 10 and n as far as k <= n; empty where a problem has one answer.

    Args:
        rows: answers by (problem, sample).
    """
    num_samples = len(rows[0])
    if num_samples == 1:
        return {}
    num_right = [sum(map(RATES["accepted_at_1"], row)) for row in rows]
    wanted = sorted(k for k in {*WANTED_K, num_samples} if k <= num_samples)
    return {f"pass_at_{k}": [pass_at_k(num_samples, right, k) for right in num_right] for k in wanted}
