"""Writing the files of a checkpoint: digested on the way, flushed to the disk, and a failure that names its file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.utils.serialization import config

from verl_ext.errors import UserError

CHUNK_BYTES = 16 << 20

Entry = dict[str, Any]
"""Size in bytes and XXH3-128 digest of a file, as in the manifest."""


class DigestingFile:
    """A new file, written front to back; what was meant to be written is digested, so a fault of the disk shows.

    Args:
        path: created or emptied.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._num_bytes = self._handed_over = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append anything with a buffer; torch calls this for every tensor."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._num_bytes += len(view)
        try:
            rest = view
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error  # torch reports a failed write as a corrupt position; this is the reason
            raise
        if self._num_bytes - self._handed_over >= CHUNK_BYTES:
            self._hand_over()
        return len(view)

    def _hand_over(self) -> None:
        """Have the kernel begin to write to the disk now, so that little is left to wait for at the end."""
        count = self._num_bytes - self._handed_over
        os.posix_fadvise(self._file.fileno(), self._handed_over, count, os.POSIX_FADV_DONTNEED)
        self._handed_over = self._num_bytes

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> Entry:
        """Force the file to the disk and return its entry."""
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self._num_bytes, "xxh3_128": self._digest.hexdigest()}

    def abandon(self) -> None:
        """Let go of a file whose writing failed."""
        self._file.close()


def write_bytes(path: Path, *parts: bytes) -> Entry:
    """Write a file and force it to the disk."""
    with naming(path):
        file = DigestingFile(path)
        try:
            for part in parts:
                file.write(part)
            return file.close()
        finally:
            file.abandon()


def write_object(path: Path, content: Any) -> Entry:
    """`torch.save` and force to the disk, in one pass and without torch's own slow checksum."""
    with naming(path), config.patch("save.compute_crc32", False):
        file = DigestingFile(path)
        try:
            torch.save(content, file)
            return file.close()
        except Exception:
            if file.error is not None:
                raise file.error from None
            raise
        finally:
            file.abandon()


def flush_and_digest(path: Path) -> Entry:
    """Force a file that several ranks wrote to the disk, and read it for its digest."""
    with naming(path), path.open("rb") as file:
        digest = xxhash.xxh3_128()
        os.fsync(file.fileno())
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
        return {"bytes": file.tell(), "xxh3_128": digest.hexdigest()}


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a failure of the file system into one sentence that says which file and why."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(
            f"the checkpoint could not be saved: {where}: {error.strerror}; every earlier checkpoint is as it was. "
            "Make room or mend the directory, then type the same command again"
        ) from error
