"""Writes the weights of `huggingface/`: every rank its own rows, straight into the final files, a tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path

import torch

from verl_ext.checkpoint.safetensors_layout import Form, SafetensorsLayout
from verl_ext.checkpoint.shards import MODEL, ShardFiles, is_sharded, local_part, rows_of
from verl_ext.checkpoint.weights import Adapter, Weight, read_plan
from verl_ext.checkpoint.writing import save_errors
from verl_ext.files import GIB


def layout_of(
    weights: list[Weight], state: Mapping[str, torch.Tensor], dtype: torch.dtype, max_shard_gib: float
) -> SafetensorsLayout:
    """The files of an export.

    Args:
        weights: what is exported.
        state: the model's tensors by source name; only their whole shapes and types are looked at.
        dtype: of floating-point tensors on the disk.
        max_shard_gib: largest size of one file, GiB.
    """
    forms = {}
    for weight in weights:
        tensor = state[weight.source]
        forms[weight.name] = Form(weight.shape(tensor.shape), dtype if tensor.dtype.is_floating_point else tensor.dtype)
    return SafetensorsLayout(forms, int(max_shard_gib * GIB))


def create_files(directory: Path, layout: SafetensorsLayout) -> None:
    """Make the files of an export in their full size, with all but the tensors in them.

    One process does it before any writes rows: were the file to grow under several nodes' hands, a network file system
    could fill up a page of one of them with zeros over what the other wrote there.
    """
    for name, header in layout.headers.items():
        with save_errors(directory / name), open(directory / name, "wb") as file:
            file.write(header)
            file.truncate(layout.sizes[name])


class ExportWriter:
    """Writes rows of tensors to their places in the files of an export; several processes may do so at once.

    Args:
        directory: the `huggingface/` folder, with the files of `create_files`.
        layout: of the files.
    """

    def __init__(self, directory: Path, layout: SafetensorsLayout) -> None:
        self.directory, self.layout = directory, layout
        self._files: dict[str, int] = {}

    def write_rows(self, name: str, start: int, rows: torch.Tensor) -> None:
        """Write rows of one tensor.

        Args:
            name: in the export.
            start: number of the first row.
            rows: (rows, ...) of the tensor, on any device, in any floating-point type.
        """
        form, slot = self.layout.forms[name], self.layout.slots[name]
        values = rows.detach().to(dtype=form.dtype).cpu().contiguous()
        data = values.reshape(-1).view(torch.uint8).numpy().data
        self._write(slot.file, slot.offset + start * form.row_bytes, data)

    def close(self) -> None:
        """Force what was written to the disk."""
        for file, descriptor in self._files.items():
            with save_errors(self.directory / file):
                os.fsync(descriptor)
                os.close(descriptor)
        self._files.clear()

    def _write(self, file: str, position: int, data: memoryview) -> None:
        path = self.directory / file
        with save_errors(path):
            if file not in self._files:
                self._files[file] = os.open(path, os.O_WRONLY)
            while data:
                written = os.pwrite(self._files[file], data, position)
                data, position = data[written:], position + written


def write_own_rows(
    writer: ExportWriter,
    weights: list[Weight],
    state: Mapping[str, torch.Tensor],
    factors: Mapping[str, torch.Tensor],
    rank: int,
) -> None:
    """Write what this rank holds of a sharded model; all ranks together write the whole export.

    Args:
        writer: of the export.
        weights: what is exported.
        state: this rank's state of the model.
        factors: whole A and B of every LoRA adapter.
        rank: rank 0 writes the tensors that are not sharded.
    """
    for source, of_source in groupby(weights, key=lambda weight: weight.source):
        tensor, parts = state[source], list(of_source)
        start, end = rows_of(tensor)
        if start < end and (rank == 0 or is_sharded(tensor)):
            rows = merged(parts[0].adapter, local_part(tensor), factors, start, end)
            for weight in parts:
                writer.write_rows(weight.name, *weight.of_rows(rows, start))
    writer.close()


def merged(
    adapter: Adapter | None, rows: torch.Tensor, factors: Mapping[str, torch.Tensor], start: int, end: int
) -> torch.Tensor:
    """Rows of a tensor with its adapter added."""
    return rows if adapter is None else rows + adapter.rows(factors, start, end).to(rows)


def export_from_shards(
    checkpoint: Path, directory: Path, dtype: torch.dtype, max_shard_gib: float, progress: Callable[[int], None]
) -> SafetensorsLayout:
    """Write the weights of an export from a checkpoint's shards, on one process and one tensor in memory at a time.

    Args:
        checkpoint: a `global_step_N`.
        directory: receives the safetensors files; exists.
        dtype: of floating-point tensors on the disk.
        max_shard_gib: largest size of one file, GiB.
        progress: told the number of bytes of each tensor that was read.

    Raises:
        UserError: the shards are not all there, or a file cannot be written.
    """
    files = ShardFiles(checkpoint, MODEL)
    state = files.content(0)
    weights = read_plan(checkpoint, state)
    layout = layout_of(weights, state, dtype, max_shard_gib)
    create_files(directory, layout)
    writer = ExportWriter(directory, layout)
    for source, of_source in groupby(weights, key=lambda weight: weight.source):
        whole, parts = files.tensor(source).whole(), list(of_source)
        end = whole.shape[0] if whole.dim() else 1
        adapter = parts[0].adapter
        factors = {name: files.tensor(name).whole() for name in ((adapter.down, adapter.up) if adapter else ())}
        rows = merged(adapter, whole, factors, 0, end)
        for weight in parts:
            writer.write_rows(weight.name, *weight.of_rows(rows, 0))
        progress(whole.nbytes)
    writer.close()
    return layout
