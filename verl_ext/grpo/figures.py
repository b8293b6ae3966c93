"""Figures of values that lie on all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_ext.distributed import reduce_over_ranks


@dataclass(frozen=True)
class Spread:
    """Of all ranks' values together; `std` is that of the values themselves, not of what they were drawn from."""

    mean: float
    std: float
    min: float
    max: float

    def named(self, name: str, *figures: str) -> dict[str, float]:
        """Some of the figures as metrics: `mean` as `NAME_mean`."""
        return {f"{name}_{figure}": getattr(self, figure) for figure in figures}


def spreads(columns: Mapping[str, Sequence[float]], device: str) -> dict[str, Spread]:
    """The spread of every column that has a value on any rank; collective, with the same columns on every rank."""
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for name, values in columns.items():
        sums |= {f"{name} n": len(values), f"{name} x": math.fsum(values)}
        maxima |= {
            f"{name} max": max(values, default=-math.inf),
            f"{name} min": max((-v for v in values), default=-math.inf),
        }
    found = reduce_over_ranks(sums=sums, maxima=maxima, device=device)
    means = {name: found[f"{name} x"] / found[f"{name} n"] for name in columns if found[f"{name} n"]}
    squares = {name: math.fsum((value - mean) ** 2 for value in columns[name]) for name, mean in means.items()}
    squares = reduce_over_ranks(sums=squares, device=device)
    return {
        name: Spread(
            means[name], math.sqrt(squares[name] / found[f"{name} n"]), -found[f"{name} min"], found[f"{name} max"]
        )
        for name in means
    }
