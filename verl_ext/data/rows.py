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


class TokenRows(Rows):
    """Samples of `input_ids` and `loss_mask`, each (seq,).

    Attributes:
        lengths: tokens of each sample, (num_samples,).
    """

    lengths: np.ndarray

    @abstractmethod
    def turn_ends(self) -> Counter[int]:
        """How many samples have each token as their last learnt one."""
