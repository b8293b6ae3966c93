"""Writing the files of a checkpoint: digested on the way, flushed to the disk, and a failure that names its file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch.utils.serialization import config

from verl_ext.checkpoint.stock import CHUNK_BYTES
from verl_ext.errors import UserError
from verl_ext.files import file_digest

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

    @property
    def entry(self) -> Entry:
        """Of what was written so far."""
        return {"bytes": self._num_bytes, "xxh3_128": self._digest.hexdigest()}

    def force(self) -> None:
        """Wait until the file is on the disk, and close it."""
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Let go of a file whose writing failed."""
        self._file.close()


class FileWriter:
    """Writes files and forces each to the disk while the next ones are written; leaving the context waits for all.

    Raises:
        UserError: on writing a file or on leaving, which file could not be written and why.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix="fsync")
        self._forced: list[tuple[Path, Future[None]]] = []

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        for path, forced in self._forced if error is None else []:
            with save_errors(path):
                forced.result()

    def write_bytes(self, path: Path, content: bytes) -> Entry:
        """Write a file."""
        return self._write(path, lambda file: file.write(content))

    def write_object(self, path: Path, content: Any) -> Entry:
        """`torch.save`, in one pass and without torch's own slow checksum."""
        with config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # torch adds it at run time
            # torch asks for a whole IO, and uses `write` and `flush`
            return self._write(path, lambda file: torch.save(content, file))  # type: ignore[arg-type]

    def _write(self, path: Path, fill: Callable[[DigestingFile], object]) -> Entry:
        with save_errors(path):
            file = DigestingFile(path)
            try:
                fill(file)
            except Exception:
                file.abandon()
                if file.error is not None:
                    raise file.error from None
                raise
        self._forced.append((path, self._pool.submit(file.force)))
        return file.entry


def flush_and_digest(path: Path) -> Entry:
    """Force a file that several ranks wrote to the disk, and read it for its digest."""
    with save_errors(path), path.open("rb") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "xxh3_128": file_digest(path)}


@contextmanager
def save_errors(path: Path, what: str = "the checkpoint could not be saved") -> Iterator[None]:
    """Turn a failure of the file system into one sentence that says what could not be done, which file and why."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise UserError(
            f"{what} ({where}: {error.strerror}); make room or make the directory writable, then type the same "
            "command again: every earlier checkpoint is as it was"
        ) from error
