"""Significance of the difference of two models on the same problems."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MCNEMAR = "McNemar's exact test"
SIGN_FLIP = "sign-flip permutation test over problems"

_RESAMPLES = 9999
_SEED = 0


def paired_test(differences: NDArray[np.float64], num_samples: int) -> tuple[float, str]:
    """Return the two-sided p-value of the mean difference, and the name of the test.

    With one answer per problem, the test is McNemar's exact test. With several, it is the sign-flip permutation test,
    of which McNemar's is a special case.

    Args:
        differences: share of solved answers of model b minus that of model a for each problem, -1 to 1.
        num_samples: answers per problem and model.
    """
    if num_samples == 1:
        return mcnemar_exact(int(np.sum(differences < 0)), int(np.sum(differences > 0))), MCNEMAR
    return sign_flip_test(differences), SIGN_FLIP


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's exact test.

    Args:
        only_a: problems that only model a solves.
        only_b: problems that only model b solves.

    Source:
        McNemar 1947, Psychometrika 12(2), with the binomial distribution instead of its normal approximation.
    """
    from scipy.stats import binomtest  # takes nearly a second to import

    discordant = only_a + only_b
    return float(binomtest(only_b, discordant, 0.5).pvalue) if discordant else 1.0


def sign_flip_test(differences: NDArray[np.float64]) -> float:
    """Two-sided p-value of the sign-flip permutation test of the mean difference.

    It is exact for up to 13 problems. Otherwise, it comes from random flips with a fixed seed.
    """
    from scipy.stats import permutation_test

    if not differences.any():
        return 1.0
    result = permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=_RESAMPLES,
        batch=1000,
        rng=np.random.default_rng(_SEED),
    )
    return float(result.pvalue)
