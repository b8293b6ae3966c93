"""One figure for all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl_ext.errors import UserError

if TYPE_CHECKING:
    import torch


def reduce_over_ranks(
    *,
    sums: Mapping[str, float] | None = None,
    maxima: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, float]:
    """Combine each rank's values in float64, with at most one collective for the sums and one for the maxima.

    Every rank must call this with the same names. Without an initialised process group this rank is
    alone and its own values come back. A mean weighted by tokens is the quotient of two of the sums.

    Args:
        sums: values to add over the ranks, by name.
        maxima: values of which the largest is wanted, by name; NaN on any rank gives NaN.
        device: where the tensors are put; must suit the backend (a CUDA device for NCCL).

    Returns:
        The reduced value by name, sums and maxima together, the same on every rank.

    Raises:
        UserError: a name is in both `sums` and `maxima`.
    """
    sums, maxima = dict(sums or {}), dict(maxima or {})
    if both := sorted(sums.keys() & maxima.keys()):
        raise UserError(f"each name is either summed or maximised, not both: {', '.join(both)}")
    return {**_reduce_sums(sums, device), **_reduce_maxima(maxima, device)}


def _reduce_sums(values: dict[str, float], device: torch.device | str) -> dict[str, float]:
    names = sorted(values)  # ranks may have filled their dictionaries in different orders
    return dict(zip(names, _all_reduce([values[name] for name in names], "SUM", device)))


def _reduce_maxima(values: dict[str, float], device: torch.device | str) -> dict[str, float]:
    names = sorted(values)
    # Backends disagree on the maximum of NaN and a number, so NaN travels as a flag beside each value.
    flags = [float(math.isnan(values[name])) for name in names]
    numbers = [-math.inf if flag else float(values[name]) for name, flag in zip(names, flags)]
    reduced = _all_reduce(numbers + flags, "MAX", device)
    return {
        name: math.nan if flag else value
        for name, value, flag in zip(names, reduced[: len(names)], reduced[len(names) :])
    }


def _all_reduce(values: Sequence[float], operation: str, device: torch.device | str) -> list[float]:
    import torch
    import torch.distributed as dist

    if not values or not (dist.is_available() and dist.is_initialized()):
        return [float(value) for value in values]
    tensor = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation))
    return tensor.tolist()
