"""`export`: writes the Hugging Face model of a checkpoint from its shards, and lists it in the manifest."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from secrets import token_hex
from types import MappingProxyType

import torch

from verl_ext.checkpoint.config import ExportConfig
from verl_ext.checkpoint.hf_export import ExportWriter, SafetensorsLayout, create_files, layout_of
from verl_ext.checkpoint.hf_tensors import merge_rows, read_plan
from verl_ext.checkpoint.inspection import newest_resumable, require_steps
from verl_ext.checkpoint.lease import hold_lease, lease_holders
from verl_ext.checkpoint.manifest import (
    EXPORT,
    INDEX,
    MANIFEST,
    MODEL,
    Manifest,
    damaged_files,
    has_export,
    is_verl_checkpoint,
    list_checkpoints,
    read_complete,
    shards_of,
    step_of,
    why_incomplete,
)
from verl_ext.checkpoint.save import FileWriter, sync_and_digest
from verl_ext.checkpoint.shards import ShardFiles
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary, progress_bar, typed_path, warn
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import ignore_progress, parse_json, replace_file, sync_directory, temporary_lock, write_errors
from verl_ext.model_files import CONTROLLER_TYPE
from verl_ext.verl_api import PrecisionType

Progress = Callable[[int], None]
"""Called with the number of shard bytes read. Each shard is read twice: for its digest and for the export."""
DTYPES = ("bf16", "fp16", "fp32")


# The command


def export(arguments: argparse.Namespace) -> int:
    """Write the export and print its path."""
    checkpoint = _choose(arguments.run_dir, arguments.step)
    dtype = arguments.dtype or export_dtype_of(checkpoint)
    num_bytes = sum(path.stat().st_size for path in shards_of(checkpoint, MODEL))
    total = num_bytes * 2 if _can_be_checked(checkpoint) else num_bytes  # see `Progress`
    with progress_bar(total=total, desc="exporting", unit="B") as bar:
        target = rebuild_export(checkpoint, arguments.output, dtype, arguments.max_shard_gib, bar.update)
    print_summary(f"Exported: {checkpoint.name}", {"model": target, "dtype": dtype}, evaluation_command(target))
    return 0


def evaluation_command(export: Path) -> list[str]:
    """Return the command that evaluates an export; empty for a vision-language model, which no command evaluates."""
    config = parse_json((export / "config.json").read_bytes())
    if "vision_config" in config:
        return []
    if config.get("model_type") != CONTROLLER_TYPE:
        return [*typed_command("eval"), "run", "--checkpoint", typed_path(export)]
    questions = [] if export.name == EXPORT else ["--questions", "FOLDER"]  # only a run names its questions
    return [*typed_command("eval"), "adaptive", "--checkpoint", typed_path(export), *questions]


def _choose(run_dir: Path, step: int | None) -> Path:
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a directory; specify a run directory or a global_step_N in it")
    if step_of(run_dir.resolve()) is not None and step is None:
        return run_dir.resolve()
    if step is not None:
        return require_steps(run_dir, [step])[0]
    newest = newest_resumable(run_dir)
    if newest is None:
        raise UserError(f"{run_dir} contains no complete checkpoint; use --step N to select one with all model shards")
    for later in list_checkpoints(run_dir):
        if (step_of(later) or 0) > (step_of(newest) or 0) and (problem := why_incomplete(later)):
            warn(f"{later.name} is newer than {newest.name}, but incomplete: {problem}")
    return newest


def export_dtype_of(checkpoint: Path) -> str:
    """The dtype of the run's own exports, which every save records in the manifest; bf16 for verl's checkpoints."""
    try:
        recorded = Manifest.read(checkpoint).export_dtype
    except ValueError:  # `require_undamaged_shards` reports it
        recorded = ""
    return recorded if recorded in DTYPES else "bf16"


# The export


def rebuild_export(
    checkpoint: Path,
    output: Path | None,
    dtype: str,
    max_shard_gib: float,
    progress: Progress = ignore_progress,
    small_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write the Hugging Face model of a checkpoint, and return its directory.

    Only one process at a time may write to a directory, because the export replaces its files.

    Args:
        output: a directory that does not exist yet; None writes the weights to the checkpoint's own `huggingface/`.
        dtype: bf16, fp16 or fp32.
        max_shard_gib: maximum size of a file, in GiB.
        progress: see `Progress`.
        small_files: content of the configuration, tokenizer and similar files, by path relative to the export; empty to
            use those of the checkpoint, and for missing or damaged ones those of another checkpoint of the run.

    Raises:
        UserError: the shards are damaged or incomplete, a small file is missing and no other checkpoint has it, a file
            cannot be written, another process is writing to the directory, or `output` is None and another process
            may be reading the present export.
    """
    if output is not None and output.exists():
        raise UserError(f"{output} already exists; specify a new directory")
    target = output or checkpoint / EXPORT

    def refuse() -> None:
        raise UserError(f"another process is writing an export to {target}; wait for it, or stop it")

    with write_errors(target):
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
        with _export_lock(target, refuse) as has_lock:
            return _write_export(checkpoint, output, dtype, max_shard_gib, progress, small_files, has_lock=has_lock)


def _export_lock(target: Path, on_wait: Callable[[], None]) -> AbstractContextManager[bool]:
    return temporary_lock(target.with_name(f"{target.name}.lock"), on_wait)


def _write_export(
    checkpoint: Path,
    output: Path | None,
    dtype: str,
    max_shard_gib: float,
    progress: Progress,
    small_files: Mapping[str, bytes],
    *,
    has_lock: bool,
) -> Path:
    """See `rebuild_export`; `has_lock` is the value of the lock, which the caller holds."""
    target = output or checkpoint / EXPORT
    # a unique name, because not all file systems have locks
    partial = target.with_name(f"{target.name}.{token_hex(4)}.partial")
    with hold_lease(checkpoint) as own_lease:
        if output is None:
            _require_no_readers(checkpoint, own_lease)
        require_undamaged_shards(checkpoint, progress)
        if has_lock:
            _remove_leftovers(target)
        try:
            partial.mkdir()
            for name, content in (small_files or _small_files_of_siblings(checkpoint)).items():
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                (partial / name).write_bytes(content)
            write_weights(checkpoint, partial, dtype, max_shard_gib, progress)
            if output is not None:
                copy_small_files(checkpoint / EXPORT, partial)
                os.rename(partial, output)
            else:
                _require_no_readers(checkpoint, own_lease)  # again, because the lines above may have taken minutes
                _move_into_checkpoint(checkpoint, partial)
        except BaseException:  # the disk may be full, and later saves need the space
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return target


def write_deferred_export(checkpoint: Path, config: ExportConfig, small_files: Mapping[str, bytes]) -> None:
    """Write an export that the last save skipped, or that is damaged; a failure is only a warning.

    Args:
        small_files: see `rebuild_export`; used for a damaged export, because a skipped one has those of its save.
    """
    if EXPORT not in read_complete(checkpoint).deferred:
        return
    name, target = f"{checkpoint.name}/{EXPORT}/", checkpoint / EXPORT

    def announce_wait() -> None:
        print_line(f"Waiting for another process that is writing {name}", sys.__stdout__)

    try:
        with write_errors(target), _export_lock(target, announce_wait) as has_lock:
            manifest = read_complete(checkpoint)
            if EXPORT not in manifest.deferred:  # the other process has written it
                return
            why = "is damaged" if manifest.has_damaged_export else "the last save skipped"
            has_own = not manifest.has_damaged_export and (target / "config.json").is_file()
            print_line(f"Writing {name}, which {why}", sys.__stdout__)
            _write_export(
                checkpoint,
                None,
                export_dtype_of(checkpoint),
                config.max_shard_gib,
                ignore_progress,
                {} if has_own else small_files,
                has_lock=has_lock,
            )
    except (UserError, ValueError) as error:  # ValueError: another process has removed the checkpoint
        warn(f"{checkpoint.name} has no export yet: {error}")


def _require_no_readers(checkpoint: Path, own_lease: Path | None) -> None:
    """Refuse to replace an export that others may be reading; a missing or damaged one has no readers.

    Raises:
        UserError: another process holds a lease on the checkpoint.
    """
    try:
        is_usable = EXPORT not in read_complete(checkpoint).deferred and has_export(checkpoint)
    except ValueError:  # incomplete, or renamed
        is_usable = has_export(checkpoint)
    if is_usable and (holders := lease_holders(checkpoint, except_for=own_lease)):
        raise UserError(
            f"{checkpoint / EXPORT} may be in use, because {checkpoint.name} is being read by {', '.join(holders)}; "
            "wait for it or stop it, or export to another directory with --output DIR"
        )


def _remove_leftovers(target: Path) -> None:
    """Remove what killed processes left of their exports to `target`, under its lock."""
    leftover = re.compile(rf"{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.partial")
    for path in target.parent.iterdir():
        if leftover.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def _small_files_of_siblings(checkpoint: Path) -> dict[str, bytes]:
    """Read the missing and damaged small files of an export from other checkpoints; all exports of a run share them."""
    siblings = [each for each in list_checkpoints(checkpoint.parent) if each.name != checkpoint.name]
    problems = _damaged_small_files(checkpoint)
    if not problems and not (checkpoint / EXPORT / "config.json").exists():  # it was saved without an export
        source = next((each for each in siblings if _has_undamaged(each, f"{EXPORT}/config.json")), None)
        names = [name for name in _small_files(source) if _has_undamaged(source, name)] if source else []
        problems = dict.fromkeys(names, "is missing")
    found = {}
    for name, problem in problems.items():
        source = next((each for each in siblings if _has_undamaged(each, name)), None)
        if source is not None:
            print_line(f"{checkpoint.name}/{name} {problem}; using that of {source.name}", sys.stderr)
            found[name.removeprefix(f"{EXPORT}/")] = (source / name).read_bytes()
        elif (checkpoint / name).is_file():
            warn(f"{checkpoint.name}/{name} {problem}, and no other checkpoint has it; the export contains it as it is")
        else:
            raise UserError(
                f"{checkpoint / name} {problem}, and no other checkpoint of the run has it; copy it there from the "
                "model that the run started from"
            )
    return found


def _small_files(checkpoint: Path) -> list[str]:
    """Paths in a checkpoint of its export's files, except weights and links that point outside the checkpoint."""
    return sorted(
        str(path.relative_to(checkpoint))
        for path in (checkpoint / EXPORT).rglob("*")
        if path.is_file() and not _is_weights(path.name) and not _points_outside(path, checkpoint)
    )


def _damaged_small_files(checkpoint: Path) -> dict[str, str]:
    try:
        names = [name for name in Manifest.read(checkpoint).export_entries if not _is_weights(name)]
        return damaged_files(checkpoint, names)
    except ValueError:  # `require_undamaged_shards` reports it
        return {}


def _has_undamaged(checkpoint: Path, name: str) -> bool:
    try:
        return name in _small_files(checkpoint) and not damaged_files(checkpoint, [name])
    except ValueError:  # it has no manifest
        return False


def _can_be_checked(checkpoint: Path) -> bool:
    """Whether damage can be detected: by the manifest's digests, or by the checksums in verl's files."""
    return (checkpoint / MANIFEST).exists() or is_verl_checkpoint(checkpoint)


def require_undamaged_shards(checkpoint: Path, progress: Progress) -> None:
    if not _can_be_checked(checkpoint):
        warn(f"{checkpoint} has no {MANIFEST}, so its shards cannot be checked")
        return
    try:
        names = [name for name in Manifest.read(checkpoint).files if name.startswith(f"{MODEL}_world_size_")]
        problems = [f"its file {name} {what}" for name, what in damaged_files(checkpoint, names, progress).items()]
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise UserError(f"{checkpoint} cannot be exported: {problems[0]}; use another checkpoint")


def write_weights(checkpoint: Path, directory: Path, dtype: str, max_shard_gib: float, progress: Progress) -> None:
    """Write the safetensors files, their index, and the configuration with the new dtype."""
    torch_dtype = PrecisionType.to_dtype(dtype)
    new, own = directory / "config.json", checkpoint / EXPORT / "config.json"
    if not new.exists() and _points_outside(own, checkpoint):
        raise UserError(f"{own} is a link that points outside the checkpoint; replace it with a copy of the file")
    try:
        config = parse_json((new if new.exists() else own).read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint} has no {EXPORT}/config.json; copy it and the tokenizer from the model that the run started "
            "from"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{own} cannot be read ({first_line_of(error)}); copy it there from the model that the run started from"
        ) from error
    layout = export_from_shards(checkpoint, directory, torch_dtype, max_shard_gib, progress)
    config["dtype"] = str(torch_dtype).removeprefix("torch.")
    with FileWriter() as files:
        if layout.index is not None:
            files.write_bytes(directory / INDEX, layout.index)
        files.write_bytes(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def export_from_shards(
    checkpoint: Path, directory: Path, dtype: torch.dtype, max_shard_gib: float, progress: Progress
) -> SafetensorsLayout:
    """Write the weights of an export to a directory, with one tensor in memory at a time."""
    files = ShardFiles(checkpoint, MODEL)
    state = files.content(0)
    tensors = read_plan(checkpoint, state)
    layout = layout_of(tensors, state, dtype, max_shard_gib)
    create_files(directory, layout)
    with ExportWriter(directory, layout) as writer:
        for source, of_source in groupby(tensors, key=lambda tensor: tensor.source):
            full, parts = files.tensor(source).full(), list(of_source)
            adapter = parts[0].adapter
            factors = {name: files.tensor(name).full() for name in ((adapter.down, adapter.up) if adapter else ())}
            rows = merge_rows(adapter, full, factors, 0, full.shape[0] if full.dim() else 1)
            for tensor in parts:
                writer.write_rows(tensor.name, *tensor.of_rows(rows, 0))
            progress(full.nbytes)
    return layout


def copy_small_files(source: Path, target: Path) -> None:
    """Copy the tokenizer and similar files to an export elsewhere, without overwriting files.

    Skips links that leave the checkpoint: exports are often shared, and the linked file may be private.
    """
    for path in source.rglob("*"):
        if _points_outside(path, source.parent):
            warn(f"skipping {path}, a link that points outside the checkpoint")
            continue
        copy = target / path.relative_to(source)
        if path.is_file() and not copy.exists() and not _is_weights(path.name):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


def _points_outside(path: Path, checkpoint: Path) -> bool:
    """Whether a path in a checkpoint is a link that points outside the checkpoint."""
    return not path.resolve().is_relative_to(checkpoint.resolve())


def _move_into_checkpoint(checkpoint: Path, partial: Path) -> None:
    """Move new weights into `huggingface/`; a crash in between leaves a checkpoint with a deferred export."""
    target = checkpoint / EXPORT
    target.mkdir(exist_ok=True)
    written = sorted(path.relative_to(partial) for path in partial.rglob("*") if path.is_file())
    entries = {f"{EXPORT}/{path}": sync_and_digest(partial / path) for path in written}
    manifest = Manifest.read(checkpoint) if (checkpoint / MANIFEST).exists() else None
    if manifest is not None:
        old = {name for name in manifest.export_entries if _is_weights(name)}
        rest = manifest.with_files({name: entry for name, entry in manifest.files.items() if name not in old})
        replace_file(checkpoint / MANIFEST, [replace(rest, deferred=(EXPORT,)).to_json()])
    for path in target.iterdir():
        if _is_weights(path.name):
            path.unlink()
    for path in written:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial / path, target / path)
    shutil.rmtree(partial)
    sync_directory(target)
    if manifest is not None:
        kept = {name: sync_and_digest(checkpoint / name) for name in _small_files(checkpoint) if name in rest.files}
        others = {name: entry for name, entry in rest.files.items() if name not in rest.export_entries}
        files = {**others, **kept, **entries}
        replace_file(checkpoint / MANIFEST, [replace(manifest, files=files, deferred=()).to_json()])


def _is_weights(name: str) -> bool:
    """Whether a file in `huggingface/` holds weights or their index."""
    return name.endswith((".safetensors", INDEX))
