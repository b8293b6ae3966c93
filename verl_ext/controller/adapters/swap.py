"""The former place of `SkippedBlock`, for adapters of earlier releases; the next release drops it."""

from __future__ import annotations

from typing import Any

from verl_ext.controller.adapters.base import SkippedBlock


def Skipped(*arguments: Any) -> SkippedBlock:  # noqa: N802
    """`SkippedBlock` by its former name and arguments: the block, which is not used, and the function."""
    return SkippedBlock(arguments[-1])
