"""The former module of `SkippedBlock`, for adapters written for earlier releases; the next release removes it."""

from __future__ import annotations

from typing import Any

from verl_ext.controller.adapters.base import SkippedBlock


def Skipped(*arguments: Any) -> SkippedBlock:  # noqa: N802
    """Create a `SkippedBlock` with its former arguments: the block, which is unused, and the function."""
    return SkippedBlock(arguments[-1])
