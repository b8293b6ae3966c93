"""What every stage asks of its data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import Dataset


class Rows(Dataset[dict[str, Any]], ABC):
    """Samples as dictionaries, each with its number as `row`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @abstractmethod
    def describe(self, indices: Iterable[int]) -> str:
        """How messages name samples."""


class UniqueIds:
    """Numbers sample ids from their second occurrence on, so that each sample has seeds of its own.

    A number that gives an id which another sample has is passed over: `a`, `a#2`, `a` become `a`, `a#2`, `a#3`.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._seen: Counter[str] = Counter()

    def __call__(self, sample_id: str) -> str:
        """The id of the next sample, in the order of the data."""
        self._seen[sample_id] += 1
        unique = sample_id if self._seen[sample_id] == 1 else f"{sample_id}#{self._seen[sample_id]}"
        while unique in self._given:
            self._seen[sample_id] += 1
            unique = f"{sample_id}#{self._seen[sample_id]}"
        self._given.add(unique)
        return unique


class TokenRows(Rows):
    """Samples of `input_ids` and `loss_mask`, each (seq,).

    Attributes:
        lengths: tokens of each sample, (num_samples,).
    """

    lengths: np.ndarray

    @abstractmethod
    def turn_ends(self) -> Counter[int]:
        """How many samples have each token as their last learnt one."""
