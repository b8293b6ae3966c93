"""One row of figures: what was measured at one step of one attempt."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass

from verl_ext.errors import UserError

KEY_COLUMNS = ("step", "attempt", "time")


@dataclass(frozen=True)
class Row:
    """The metrics logged together.

    Attributes:
        step: optimizer steps since the run began.
        attempt: which start of the run this is, from 1.
        time: when it was logged, in seconds since 1970.
        metrics: value by metric name.
    """

    step: int
    attempt: int
    time: float
    metrics: dict[str, float]


def plain_numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Turn numpy scalars and one-element tensors into Python numbers.

    Args:
        metrics: value by metric name; non-finite values are allowed.

    Returns:
        The same names with `int` or `float` values.

    Raises:
        UserError: a value is not a number, or a metric has the name of a key column.
    """
    for reserved in KEY_COLUMNS:
        if reserved in metrics:
            raise UserError(f"a metric cannot be named '{reserved}': every row has a column of that name")
    return {name: _plain_number(name, value) for name, value in metrics.items()}


def _plain_number(name: str, value: float) -> float:
    if isinstance(value, numbers.Integral):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"the metric '{name}' must be a number, not {value!r}") from error
