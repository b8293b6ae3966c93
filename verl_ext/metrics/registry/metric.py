"""What there is to say of a metric."""

from __future__ import annotations

from dataclasses import dataclass

SAME = "the same on every rank"
SUM = "sum over ranks"
LARGEST = "largest over ranks"
RATE = "sum over ranks / seconds of the slowest rank"
RANK_0 = "rank 0's clock"
TOKEN_MEAN = "sum of token losses over ranks / sum of loss tokens over ranks"


@dataclass(frozen=True)
class Metric:
    """What a metric's numbers mean.

    Attributes:
        unit: the unit of the value, `1` for a pure number.
        meaning: one sentence.
        reduction: how the values of all ranks become the logged one.
    """

    unit: str
    meaning: str
    reduction: str
