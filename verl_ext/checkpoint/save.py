"""One save, from a rank's state to a committed checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from verl_ext.checkpoint.commit import publish, remove_tree, write_manifest
from verl_ext.checkpoint.export import ExportWriter, write_own_rows
from verl_ext.checkpoint.exporter import Export
from verl_ext.checkpoint.layout import EXPORT, Manifest
from verl_ext.checkpoint.retention import Retention
from verl_ext.checkpoint.rotation import rotate
from verl_ext.checkpoint.shards import MODEL, shard_name
from verl_ext.checkpoint.space import warn_if_next_will_not_fit
from verl_ext.checkpoint.writing import Entry, FileWriter, flush_and_digest, save_errors
from verl_ext.distributed import gather_results, on_rank_zero
from verl_ext.errors import UserError
from verl_ext.files import TEMPORARY


@dataclass
class Save:
    """Everything that a save needs and training no longer touches.

    Attributes:
        final: `.../global_step_N`.
        rank: this rank.
        manifest: with everything but the list of files.
        state: what this rank writes, by kind of shard.
        export: the weights of `huggingface/`, None when there are none this time.
        shared_files: content by relative path of what there is once, for rank 0; bytes as they are, all else by
            `torch.save`.
        retention: what stays on the disk afterwards.
        group: the ranks, for this save alone.
        warn: receives what went wrong without stopping the run.
    """

    final: Path
    rank: int
    manifest: Manifest
    state: dict[str, Any]
    export: Export | None
    shared_files: dict[str, Any]
    retention: Retention
    group: ProcessGroup
    warn: Callable[[str], None]

    @property
    def temporary(self) -> Path:
        """Where the checkpoint is until it is complete."""
        return temporary_of(self.final)

    def write(self) -> float:
        """Write and commit; collective.

        Returns:
            Seconds it took.

        Raises:
            UserError: a file could not be written; nothing of the checkpoint is left and all others are as they were.
        """
        start = time.perf_counter()
        try:
            written = gather_results(self.write_own_files, self.group)
            on_rank_zero(lambda: self.commit(written), self.group)
        except UserError:
            on_rank_zero(lambda: discard(self.temporary, self.warn), self.group)
            raise
        return time.perf_counter() - start

    def finish(self, seconds: float | None) -> float:
        """Write if that was not done yet, and rotate; returns the seconds that the writing took."""
        if seconds is None:
            seconds = self.write()
        self.rotate()
        return seconds

    def write_own_files(self) -> dict[str, Entry]:
        """This rank's shards, its rows of the export and, on rank 0, what there is once; entries by relative path."""
        entries = {}
        with FileWriter() as files:
            for kind, content in self.state.items():
                name = shard_name(kind, self.manifest.world_size, self.rank)
                entries[name] = files.write_object(self.temporary / name, content)
            for name, content in self.shared_files.items():
                write = files.write_bytes if isinstance(content, bytes) else files.write_object
                entries[name] = write(self.temporary / name, content)
            if self.export is not None:
                writer = ExportWriter(self.temporary / EXPORT, self.export.layout)
                write_own_rows(writer, self.export.weights, self.state[MODEL], self.export.factors, self.rank)
        return entries

    def commit(self, written: list[dict[str, Entry]]) -> None:
        """List what all ranks wrote and make it a checkpoint; rank 0 alone."""
        files = {name: entry for entries in written for name, entry in entries.items()}
        if self.export is not None:
            for name in self.export.layout.headers:
                files[f"{EXPORT}/{name}"] = flush_and_digest(self.temporary / EXPORT / name)
        manifest = self.manifest.with_files(files)
        with save_errors(self.temporary):
            write_manifest(self.temporary, manifest)
            publish(self.temporary, self.final, manifest.step)

    def rotate(self) -> None:
        """Remove the checkpoints that this one makes superfluous, and see whether the next one will fit."""
        if self.rank > 0:
            return
        run_dir = self.final.parent
        try:
            rotate(run_dir, self.retention, self.manifest.step, self.warn)
            warn_if_next_will_not_fit(run_dir, Manifest.read(self.final).num_bytes, self.warn)
        except (OSError, ValueError) as error:  # the checkpoint is safe; what is left over is removed next time
            self.warn(f"superfluous checkpoints of {run_dir} could not be removed ({error}); they stay on the disk")


def temporary_of(final: Path) -> Path:
    """Where a checkpoint is written before it has its name."""
    return final.with_name(f"{final.name}{TEMPORARY}")


def discard(temporary: Path, warn: Callable[[str], None]) -> None:
    """Give the space of an unfinished checkpoint back, so that what comes next has room."""
    if temporary.is_dir():
        try:
            remove_tree(temporary)
        except OSError as error:
            warn(f"{temporary} could not be removed ({error.strerror}); it is no checkpoint, delete it")
