"""Splitting rows into training and validation by group, so that what belongs together stays on one side."""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from verl_ext.cli import FloatArg, IntArg
from verl_ext.data.prepare.files import Row, write_parquet
from verl_ext.errors import UserError

TRAIN_NAME = "train.parquet"
VAL_NAME = "val.parquet"
FILES_OF_A_RUN = "data.train_files={output}/train.parquet data.val_files={output}/val.parquet"
"""Words of a training on both, behind its recipe."""


def add_split_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--val-fraction` and `--seed` to a command."""
    parser.add_argument(
        "--val-fraction",
        type=FloatArg(0, 1, closed=True),
        default=0.02,
        metavar="SHARE",
        help="of the rows, for validation; 0 writes train.parquet alone, 1 val.parquet alone",
    )
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the split")


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
        raise UserError(
            f"found {len(sizes)} separate sample(s), but a split needs 2; give more data, or do without validation "
            "(data.val_files=null; --val-fraction 0)"
        )
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


def write_split(output: Path, rows: list[Row], groups: Sequence[str], val_fraction: float, seed: int) -> dict[str, int]:
    """Write `train.parquet` and `val.parquet`; rows keep their order within each.

    Args:
        output: directory to write into.
        rows: the samples.
        groups: the group of each row, as long as `rows`.
        val_fraction: share of the rows that goes to validation; of 0 and 1 the empty file is not written.
        seed: seed of the split.

    Returns:
        The number of rows of each file that was written, `train` and `val`.

    Raises:
        UserError: there are no rows, or fewer groups than files, or a column mixes types.
    """
    if not rows:
        raise UserError("no row is left to write; give more data")
    if val_fraction in (0, 1):
        val_groups = set(groups) if val_fraction else set()
    else:
        val_groups = choose_val_groups(groups, val_fraction, seed)
    parts: dict[str, list[Row]] = {"train": [], "val": []}
    for row, group in zip(rows, groups, strict=True):
        parts["val" if group in val_groups else "train"].append(row)
    for name, part in parts.items():
        path = output / f"{name}.parquet"
        if part:
            write_parquet(path, part)
        else:
            path.unlink(missing_ok=True)  # of an earlier preparation with another share
    return {name: len(part) for name, part in parts.items() if part}
