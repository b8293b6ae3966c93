"""Saving a checkpoint: `CheckpointWriter` and `commit_directory` implement the crash-safety protocol.

1.  Rank 0 removes leftovers, checks the free space, and creates `global_step_N.tmp`.
2.  Every rank writes its files there. Digests are computed from the data in memory, so they also detect corruption by
    the disk. A rank reports only after all its files are on disk.
3.  Rank 0 writes the manifest, which makes the directory complete, and flushes the directories.
4.  Rank 0 renames an existing `global_step_N`.
5.  Rank 0 renames `global_step_N.tmp` to `global_step_N`. This is the commit.
6.  Rank 0 writes the step to the tracker.
7.  Rotation removes old checkpoints.

A failure before the commit leaves all earlier checkpoints unchanged, and is raised on every rank.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed import ProcessGroup
from torch.utils.serialization import config as torch_config

from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.hf_export import ExportedWeights, create_files
from verl_ext.checkpoint.manifest import (
    BEST,
    CHUNK_BYTES,
    EXPORT,
    MANIFEST,
    MODEL,
    FileEntry,
    Manifest,
    is_verl_checkpoint,
    shard_name,
    write_tracker,
)
from verl_ext.checkpoint.retention import (
    read_best_file,
    removal_name,
    remove_leftovers,
    remove_tree,
    rotate,
    why_protected,
)
from verl_ext.commands import typed_command
from verl_ext.console import typed_path, warn
from verl_ext.distributed import gather_results, on_rank_zero, to_local
from verl_ext.errors import UserError
from verl_ext.files import TEMPORARY, file_digest, format_bytes, free_bytes, replace_file, sync_directory, write_errors

BYTES_PER_TENSOR = 1 << 10
"""Allowance for the names, types and padding that `torch.save` writes for each tensor."""
BYTES_PER_FILE = 16 << 10
"""Allowance for rounding each file up to blocks, and for objects that are not tensors, such as RNG states."""
MARGIN = 1.05
"""Allowance for other writes to the same disk until the next save."""


@dataclass
class CheckpointWriter:
    """One save. The order of the steps is the crash-safety protocol; do not reorder them.

    Attributes:
        final: `.../global_step_N`.
        rank: rank of this process.
        manifest: manifest without its list of files.
        weights: weights for `huggingface/`; None without an export.
        shared_files: content of the files that rank 0 writes for all ranks, by relative path; bytes are written
            unchanged, anything else with `torch.save`.
        max_to_keep: number of newest checkpoints that rotation keeps; None keeps all.
        config: defines the other checkpoints that rotation keeps.
        group: process group of all ranks that only saves use.
        num_bytes: expected size of the checkpoint on disk, which `prepare` computes.
    """

    final: Path
    rank: int
    manifest: Manifest
    weights: ExportedWeights | None
    shared_files: dict[str, Any]
    max_to_keep: int | None
    config: CheckpointConfig
    group: ProcessGroup
    num_bytes: int = 0

    @property
    def temporary(self) -> Path:
        """The directory of the checkpoint until the commit."""
        return self.final.with_name(f"{self.final.name}{TEMPORARY}")

    def prepare(self, state: dict[str, Any]) -> None:
        """Remove leftovers, check the free space, and create the directory; collective.

        Raises:
            UserError: there is not enough space, or the directory cannot be created.
        """
        self.num_bytes = sum(gather_results(lambda: self._num_own_bytes(state), self.group))

        def create_directory() -> None:  # step 1
            run_dir = self.final.parent
            remove_leftovers(run_dir, warn)
            with write_errors(self.temporary):
                run_dir.mkdir(parents=True, exist_ok=True)
                require_space(run_dir, self.num_bytes)
                (self.temporary / EXPORT).mkdir(parents=True)  # fails if the leftovers could not be removed
                for name in self.shared_files:
                    (self.temporary / name).parent.mkdir(parents=True, exist_ok=True)
            if self.weights is not None:
                create_files(self.temporary / EXPORT, self.weights.layout)

        try:
            on_rank_zero(create_directory, self.group)
        except UserError as error:
            raise self._aborted(error) from error

    def write(self, state: dict[str, Any]) -> float:
        """Write this rank's state, given by kind of shard, and commit; collective.

        Returns:
            Duration in seconds.

        Raises:
            UserError: a file could not be written; the unfinished checkpoint has been removed.
        """
        start = time.perf_counter()
        try:
            written = gather_results(lambda: self._write_own_files(state), self.group)  # step 2, and a barrier
            on_rank_zero(lambda: self._commit(written), self.group)  # steps 3 to 6
        except UserError as error:  # raised on every rank, so all ranks are alive
            raise self._aborted(error) from error
        return time.perf_counter() - start

    def rotate(self) -> None:  # step 7
        """Remove old checkpoints, and warn if the next save will not fit on the disk."""
        if self.rank > 0:
            return
        run_dir = self.final.parent
        try:
            rotate(run_dir, self.max_to_keep, self.config, self.manifest.step, warn)
            warn_if_next_will_not_fit(run_dir, self.num_bytes)
        except (OSError, ValueError) as error:  # the checkpoint is safe, and the next rotation tries again
            warn(
                f"old checkpoints in {run_dir} could not be removed ({error}); check its permissions; the next "
                "rotation retries"
            )

    def _num_own_bytes(self, state: dict[str, Any]) -> int:
        """Expected size on disk of this rank's files, in bytes; rank 0 counts the export and the manifest."""
        num_bytes = bytes_of(state) + BYTES_PER_TENSOR * sum(1 for _ in local_tensors(state))
        num_bytes += sum(len(content) for content in self.shared_files.values() if isinstance(content, bytes))
        num_files = len(state) + len(self.shared_files)
        if self.rank == 0:
            num_files += 1
            if self.weights is not None:
                num_bytes += self.weights.layout.num_bytes
                num_files += len(self.weights.layout.sizes)
        return num_bytes + BYTES_PER_FILE * num_files

    def _write_own_files(self, state: dict[str, Any]) -> dict[str, FileEntry]:
        """Write this rank's shards and rows of the export, and on rank 0 the shared files; return their entries."""
        entries = {}
        with FileWriter() as files:
            for kind, content in state.items():
                name = shard_name(kind, self.manifest.world_size, self.rank)
                entries[name] = files.write_object(self.temporary / name, content)
            for name, content in self.shared_files.items():
                write = files.write_bytes if isinstance(content, bytes) else files.write_object
                entries[name] = write(self.temporary / name, content)
            if self.weights is not None:
                self.weights.write_local_rows(self.temporary / EXPORT, state[MODEL], self.rank)
        return entries

    def _commit(self, written: list[dict[str, FileEntry]]) -> None:
        """Commit the files of all ranks as a checkpoint; called on rank 0."""
        files = {name: entry for entries in written for name, entry in entries.items()}
        for name in self.weights.layout.headers if self.weights else ():  # several ranks wrote them
            files[f"{EXPORT}/{name}"] = sync_and_digest(self.temporary / EXPORT / name)
        with write_errors(self.temporary):
            commit_directory(self.temporary, self.final, self.manifest.with_files(files))

    def _aborted(self, error: UserError) -> UserError:
        """Remove the unfinished directory to free its space, and return the error to raise; collective."""

        def discard() -> None:
            try:
                if self.temporary.is_dir():
                    remove_tree(self.temporary)
            except OSError as failure:
                warn(f"{self.temporary} could not be removed ({failure.strerror}); it is not a checkpoint; delete it")

        on_rank_zero(discard, self.group)
        return UserError(
            f"{self.final.name} cannot be saved: {error}, then run the same command again, which resumes from the last "
            "complete checkpoint, if there is one"
        )


# The commit


def commit_directory(temporary: Path, final: Path, manifest: Manifest) -> None:
    """Turn a directory, whose files are all on disk, into the checkpoint `final`.

    An existing checkpoint with that name is renamed first: to `..._replaced_TIME` if it is protected or verl wrote it,
    otherwise to a name that rotation deletes.

    Raises:
        OSError: the commit failed and an existing checkpoint has its old name again, or the tracker cannot be replaced
            after the commit.
    """
    write_manifest(temporary, manifest)  # step 3
    renamed: list[tuple[Path, Path]] = []
    try:
        for path, new_name in _names_aside(final):  # step 4
            os.rename(path, new_name)
            renamed.append((path, new_name))
        os.rename(temporary, final)  # step 5
    except OSError:
        for path, new_name in reversed(renamed):
            os.rename(new_name, path)
        raise
    sync_directory(final.parent)
    write_tracker(final.parent, manifest.step)  # step 6


def add_metrics(checkpoint: Path, metrics: dict[str, float]) -> None:
    """Add metrics to the manifest of a checkpoint.

    Raises:
        UserError: the manifest cannot be read or written.
    """
    try:
        manifest = Manifest.read(checkpoint)
    except ValueError as error:
        raise UserError(
            f"the metrics of {checkpoint} cannot be recorded: {error}; restore the file, or delete the checkpoint and "
            "run the same command again"
        ) from error
    with write_errors(checkpoint):
        replace_file(checkpoint / MANIFEST, [replace(manifest, metrics=manifest.metrics | metrics).to_json()])


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes a checkpoint complete, and flush the directories to disk."""
    replace_file(directory / MANIFEST, [manifest.to_json()])
    for path in [directory, *(child for child in directory.rglob("*") if child.is_dir())]:
        sync_directory(path)


def _names_aside(final: Path) -> list[tuple[Path, Path]]:
    """Return what to rename before the commit, and the new names: an existing checkpoint and the file that selects it.

    The file must not name the new checkpoint.
    """
    if not os.path.lexists(final):
        return []
    is_kept = is_verl_checkpoint(final) or bool(why_protected(final))
    renames = [(final, _replaced_name(final) if is_kept else removal_name(final))]
    if read_best_file(final.parent)[0] == final:
        renames.insert(0, (final.parent / BEST, _replaced_name(final.parent / BEST)))
    return renames


def _replaced_name(path: Path) -> Path:
    return path.with_name(f"{path.stem}_replaced_{time.time_ns()}{path.suffix}")


# Space


def bytes_of(state: Any) -> int:
    """Bytes of this rank's tensors in nested state; tied tensors count once, because they are saved once."""
    sizes = {(part.data_ptr(), part.shape): part.numel() * part.element_size() for part in local_tensors(state)}
    return sum(sizes.values())


def local_tensors(state: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's part of each tensor in nested state."""
    if isinstance(state, torch.Tensor):
        yield to_local(state)
    elif isinstance(state, dict | list | tuple):
        for item in state.values() if isinstance(state, dict) else state:
            yield from local_tensors(item)


def require_space(directory: Path, num_bytes: int) -> None:
    """Refuse a save that does not fit on the disk."""
    free = free_bytes(directory)
    if free < num_bytes:  # rotation cannot help, because it runs only after a commit
        prune = shlex.join([*typed_command("checkpoint"), "prune", typed_path(directory), "--max-to-keep", "1"])
        raise UserError(
            f"it needs {format_bytes(num_bytes)}, but {directory} has {format_bytes(free)} free; free disk space, for "
            f"example with `{prune}`"
        )


def warn_if_next_will_not_fit(directory: Path, num_bytes: int) -> None:
    """Warn in advance if there is not enough space for another checkpoint of this size."""
    free, needed = free_bytes(directory), num_bytes * MARGIN
    if free < needed:
        warn(
            f"the next save will fail: it needs about {format_bytes(needed)}, but {directory} has "
            f"{format_bytes(free)} free; free some space before it is due"
        )


# Files


class DigestingFile:
    """A new file that is written sequentially; its digest is computed from the data in memory."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._num_bytes = self._num_started = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Append an object that supports the buffer protocol; torch calls this for every tensor."""
        view = memoryview(data).cast("B")
        self._digest.update(view)
        self._num_bytes += len(view)
        try:
            rest = view
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            self.error = error  # torch hides the reason and reports a corrupt position
            raise
        count = self._num_bytes - self._num_started
        if count >= CHUNK_BYTES:  # start writeback now, so that the final fsync is short
            os.posix_fadvise(self._file.fileno(), self._num_started, count, os.POSIX_FADV_DONTNEED)
            self._num_started = self._num_bytes
        return len(view)

    def flush(self) -> None:
        """Do nothing; there is no buffer."""

    @property
    def entry(self) -> FileEntry:
        """Size and digest of the data written so far."""
        return {"bytes": self._num_bytes, "xxh3_128": self._digest.hexdigest()}

    def close(self, sync: bool) -> None:
        """Close the file; `sync` flushes it to disk first."""
        with self._file:
            if sync:
                os.fsync(self._file.fileno())


class FileWriter:
    """Writes files, and flushes them to disk in the background; leaving the context waits for all flushes.

    Raises:
        UserError: a write or a flush failed; the message names the file and the reason.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(thread_name_prefix="fsync")
        self._synced: list[tuple[Path, Future[None]]] = []

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._pool.shutdown()
        for path, synced in self._synced if error is None else []:
            with write_errors(path):
                synced.result()

    def write_bytes(self, path: Path, content: bytes) -> FileEntry:
        """Write a file."""
        return self._write(path, lambda file: file.write(content))

    def write_object(self, path: Path, content: Any) -> FileEntry:
        """Write a file with `torch.save`, in one pass and without torch's slow checksum."""
        with torch_config.patch("save.compute_crc32", False):  # type: ignore[attr-defined]  # torch adds it at run time
            # torch's annotation asks for a complete IO, but torch only uses `write` and `flush`
            return self._write(path, lambda file: torch.save(content, file))  # type: ignore[arg-type]

    def _write(self, path: Path, fill: Callable[[DigestingFile], object]) -> FileEntry:
        with write_errors(path):
            file = DigestingFile(path)
            try:
                fill(file)
            except Exception:
                file.close(sync=False)
                if file.error is not None:
                    raise file.error from None
                raise
        self._synced.append((path, self._pool.submit(file.close, sync=True)))
        return file.entry


def sync_and_digest(path: Path) -> FileEntry:
    """Flush a file to disk, and read it to compute its digest."""
    with write_errors(path), path.open("rb") as file:
        os.fsync(file.fileno())
        return {"bytes": os.fstat(file.fileno()).st_size, "xxh3_128": file_digest(path)}
