"""Tokenised chats as flat arrays, and their way to disk and back."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from verl_ext.data.chat_template import Tokens

ABANDONED_AFTER_S = 24 * 3600
"""Age of an unfinished file that nobody is writing any more; other machines may share the directory."""


@dataclass(frozen=True)
class Tokenised:
    """The samples of a data set, behind each other.

    Attributes:
        input_ids: (num_tokens,) int32.
        loss_mask: (num_tokens,) uint8, 1 for what is learnt.
        lengths: tokens of each sample (num_samples,).
        files: number of each sample's file (num_samples,).
        rows: number of each sample in its file (num_samples,).
    """

    input_ids: np.ndarray
    loss_mask: np.ndarray
    lengths: np.ndarray
    files: np.ndarray
    rows: np.ndarray


def join(samples: Sequence[Tokens], places: Sequence[tuple[int, int]]) -> Tokenised:
    """Put samples behind each other; `places` are file and row of each."""
    files, rows = zip(*places) if places else ((), ())
    return Tokenised(
        np.concatenate([tokens for tokens, _ in samples]) if samples else np.zeros(0, np.int32),
        np.concatenate([mask for _, mask in samples]) if samples else np.zeros(0, np.uint8),
        np.array([len(tokens) for tokens, _ in samples], dtype=np.int64),
        np.array(files, dtype=np.int32),
        np.array(rows, dtype=np.int64),
    )


def write(tokenised: Tokenised, path: Path) -> None:
    """Write an Arrow file; it is there as a whole or not at all, and a failure leaves nothing behind.

    Raises:
        OSError: the directory is missing, not writable, or full.
    """
    offsets = pa.array(np.concatenate([[0], np.cumsum(tokenised.lengths)]), type=pa.int64())
    batch = pa.record_batch(
        {
            "input_ids": pa.LargeListArray.from_arrays(offsets, pa.array(tokenised.input_ids)),
            "loss_mask": pa.LargeListArray.from_arrays(offsets, pa.array(tokenised.loss_mask)),
            "file": pa.array(tokenised.files),
            "row": pa.array(tokenised.rows),
        }
    )
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as sink:
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write_batch(batch)
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    _remove_abandoned(path.parent)


def _remove_abandoned(directory: Path) -> None:
    """Remove what processes left that were killed while they wrote."""
    for path in directory.glob("*.arrow.*.tmp"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                path.unlink()


def read(path: Path) -> Tokenised:
    """Map an Arrow file into memory, which all ranks of a node then share; nothing is copied.

    Raises:
        OSError: there is none, or it cannot be read.
        ValueError: it is damaged (`pyarrow.ArrowInvalid` is one).
    """
    with pa.ipc.open_file(pa.memory_map(str(path))) as reader:
        batch = reader.get_batch(0)
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    return Tokenised(
        ids.values.to_numpy(zero_copy_only=True),
        mask.values.to_numpy(zero_copy_only=True),
        np.diff(ids.offsets.to_numpy()),
        batch.column("file").to_numpy(),
        batch.column("row").to_numpy(),
    )
