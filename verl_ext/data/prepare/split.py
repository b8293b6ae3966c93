"""Splitting rows into training and validation by group, so that what belongs together stays on one side."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verl_ext.argument_types import Number, WholeNumber
from verl_ext.data.prepare.files import Row, write_parquet
from verl_ext.errors import UserError

TRAIN_NAME = "train.parquet"
VAL_NAME = "val.parquet"
FILES_OF_A_RUN = "data.train_files={output}/train.parquet data.val_files={output}/val.parquet"
"""Words of a training on both, behind its recipe."""


def add_split_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--val-fraction` and `--seed` to a command."""
    parser.add_argument(
        "--val-fraction", type=Number(0, 1), default=0.02, metavar="SHARE", help="of the rows, for validation"
    )
    parser.add_argument("--seed", type=WholeNumber(0), default=0, help="seed of the split")


def choose_val_groups(groups: Sequence[str], val_fraction: float, seed: int) -> set[str]:
    """Choose whole groups at random until they hold `val_fraction` of the rows; at least one on each side.

    Args:
        groups: the group of each row.
        val_fraction: share of the rows that goes to validation, between 0 and 1.
        seed: seed of the choice.

    Raises:
        UserError: there are fewer than two groups.
    """
    sizes = Counter(groups)
    if len(sizes) < 2:
        raise UserError(f"found {len(sizes)} separate sample(s) but a split needs 2; give more data")
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    chosen: set[str] = set()
    num_val = 0
    for group in order[:-1]:
        if chosen and num_val >= val_fraction * len(groups):
            break
        chosen.add(group)
        num_val += sizes[group]
    return chosen


def write_split(
    output: Path, rows: list[Row], groups: Sequence[str], val_fraction: float, seed: int
) -> tuple[int, int]:
    """Write `train.parquet` and `val.parquet`; rows keep their order within each.

    Args:
        output: directory to write into.
        rows: the samples.
        groups: the group of each row, as long as `rows`.
        val_fraction: share of the rows that goes to validation.
        seed: seed of the split.

    Returns:
        The number of training and of validation rows.

    Raises:
        UserError: there are fewer than two groups, or a column mixes types.
    """
    val_groups = choose_val_groups(groups, val_fraction, seed)
    train = [row for row, group in zip(rows, groups, strict=True) if group not in val_groups]
    val = [row for row, group in zip(rows, groups, strict=True) if group in val_groups]
    write_parquet(output / TRAIN_NAME, train)
    write_parquet(output / VAL_NAME, val)
    return len(train), len(val)
