"""Makes the export of a checkpoint after the fact, and enters it into the manifest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from verl.utils.torch_dtypes import PrecisionType

from verl_ext.checkpoint.export import export_from_shards
from verl_ext.checkpoint.layout import EXPORT, MANIFEST, Manifest
from verl_ext.checkpoint.lease import leased
from verl_ext.checkpoint.safetensors_layout import INDEX
from verl_ext.checkpoint.shards import MODEL
from verl_ext.checkpoint.stock import is_stock
from verl_ext.checkpoint.verify import damaged_files
from verl_ext.checkpoint.writing import FileWriter, flush_and_digest, save_errors
from verl_ext.console import warn
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import ignore_progress, parse_json, replace_file, sync_directory

Progress = Callable[[int], None]
"""Told how many more bytes of the shards were read; each is read once for its digest and once for its weights."""


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Number types by their names in a model's configuration."""


def export_dtype_of(checkpoint: Path) -> str:
    """The number type of the run's own exports, which every save notes in the manifest.

    In a checkpoint of an earlier version only `huggingface/config.json` names it, until an export by hand changes that.

    Args:
        checkpoint: a `global_step_N`.

    Returns:
        bf16, fp16 or fp32; bf16 for a checkpoint that verl wrote, or one that has neither.
    """
    if is_stock(checkpoint):
        return "bf16"
    try:
        noted = Manifest.read(checkpoint).export_dtype
    except ValueError:  # `require_sound_shards` says what is wrong with it
        noted = ""
    if noted in DTYPES.values():
        return noted
    path = checkpoint / EXPORT / "config.json"
    if leads_out(path, checkpoint):
        return "bf16"
    try:
        return DTYPES[parse_json(path.read_bytes())["dtype"]]
    except (OSError, ValueError, LookupError, TypeError):  # `write_weights` says what is wrong with the file
        return "bf16"


def rebuild_export(
    checkpoint: Path, output: Path | None, dtype: str, max_shard_gib: float, progress: Progress = ignore_progress
) -> Path:
    """Write the Hugging Face model of a checkpoint.

    Args:
        checkpoint: a `global_step_N`.
        output: a directory that does not exist yet; None puts the weights into the checkpoint's own `huggingface/`.
        dtype: bf16, fp16 or fp32.
        max_shard_gib: largest size of one file, GiB.
        progress: told the number of bytes of each piece that was read; `bytes_to_read` is their sum.

    Returns:
        The directory of the model.

    Raises:
        UserError: the shards are damaged or not all there, or a file cannot be written.
    """
    if output is not None and output.exists():
        raise UserError(f"{output} exists already; name a new directory")
    with leased(checkpoint):
        require_sound_shards(checkpoint, progress)
        target = output or checkpoint / EXPORT
        partial = target.with_name(f"{target.name}.partial")
        with save_errors(partial, "the export could not be written"):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            write_weights(checkpoint, partial, dtype, max_shard_gib, progress)
            if output is not None:
                copy_companions(checkpoint / EXPORT, partial)
                os.rename(partial, output)
            else:
                enter_into_checkpoint(checkpoint, partial)
    return target


def bytes_to_read(checkpoint: Path) -> int:
    """About how many bytes of shards an export of this checkpoint reads."""
    num_bytes = sum(path.stat().st_size for path in checkpoint.glob(f"{MODEL}_world_size_*.pt"))
    return num_bytes * 2 if can_be_checked(checkpoint) else num_bytes


def can_be_checked(checkpoint: Path) -> bool:
    """Whether damage to the shards would be seen: by the manifest's digests, or by the checksums in verl's files."""
    return (checkpoint / MANIFEST).exists() or is_stock(checkpoint)


def require_sound_shards(checkpoint: Path, progress: Progress) -> None:
    """Refuse to export from shards that are not what was saved."""
    if not can_be_checked(checkpoint):
        warn(f"{checkpoint} has no {MANIFEST}, so its shards cannot be checked")
        return
    try:
        names = [name for name in Manifest.read(checkpoint).files if name.startswith(f"{MODEL}_world_size_")]
        problems = [f"its file {name} {what}" for name, what in damaged_files(checkpoint, names, progress).items()]
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise UserError(f"{checkpoint} cannot be exported: {problems[0]}; take another checkpoint")


def write_weights(checkpoint: Path, directory: Path, dtype: str, max_shard_gib: float, progress: Progress) -> None:
    """The safetensors files, their index, and the configuration with the new number type."""
    torch_dtype = PrecisionType.to_dtype(dtype)
    own = checkpoint / EXPORT / "config.json"
    if leads_out(own, checkpoint):
        raise UserError(f"{own} is a link to something outside of the checkpoint; put the file itself there")
    try:
        config = parse_json(own.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except FileNotFoundError:
        raise UserError(
            f"{checkpoint} has no {EXPORT}/config.json; copy it there, and the tokenizer, from the model it began from"
        ) from None
    except ValueError as error:
        raise UserError(
            f"{own} cannot be read ({first_line_of(error)}); copy it there from the model that the run began from"
        ) from error
    layout = export_from_shards(checkpoint, directory, torch_dtype, max_shard_gib, progress)
    config["dtype"] = str(torch_dtype).removeprefix("torch.")
    with FileWriter() as files:
        if layout.index is not None:
            files.write_bytes(directory / INDEX, layout.index)
        files.write_bytes(directory / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def copy_companions(source: Path, target: Path) -> None:
    """Tokenizer and the like, for an export elsewhere; what the target has already stays.

    A link that leads out of the checkpoint is left: an export is made to be given away, and such a file may not be.
    """
    for path in source.rglob("*"):
        if leads_out(path, source.parent):
            warn(f"{path} is a link to something outside of the checkpoint and is left out")
            continue
        place = target / path.relative_to(source)
        if path.is_file() and not place.exists() and not is_weights(path.name):
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def leads_out(path: Path, checkpoint: Path) -> bool:
    """Whether a path in a checkpoint is a link to something outside of it."""
    return not path.resolve().is_relative_to(checkpoint.resolve())


def enter_into_checkpoint(checkpoint: Path, partial: Path) -> None:
    """Move new weights into `huggingface/`; after a crash in between the checkpoint is complete, without an export."""
    target = checkpoint / EXPORT
    entries = {f"{EXPORT}/{path.name}": flush_and_digest(path) for path in sorted(partial.iterdir())}
    manifest = Manifest.read(checkpoint) if (checkpoint / MANIFEST).exists() else None
    if manifest is not None:
        rest = {name: e for name, e in manifest.files.items() if name not in entries and not is_exported(name)}
        replace_file(checkpoint / MANIFEST, [manifest.with_files(rest).to_json()])
    for path in target.iterdir():
        if is_weights(path.name):
            path.unlink()
    for path in partial.iterdir():
        os.replace(path, target / path.name)
    partial.rmdir()
    sync_directory(target)
    if manifest is not None:
        replace_file(checkpoint / MANIFEST, [manifest.with_files({**rest, **entries}).to_json()])


def is_exported(name: str) -> bool:
    """Whether a file of the manifest belongs to the weights of the export."""
    return name.startswith(f"{EXPORT}/") and is_weights(Path(name).name)


def is_weights(name: str) -> bool:
    """Whether a file of `huggingface/` holds weights or says where they lie."""
    return name.endswith(".safetensors") or name == INDEX
