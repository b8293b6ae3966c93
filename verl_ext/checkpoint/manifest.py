"""The format of a checkpoint directory: file names, the manifest, and checks for completeness and damage.

Checkpoints that verl itself wrote have no manifest; one is derived from their files. verl writes directly into
`global_step_N`, in this order: each rank's shards, rank 0's `huggingface/` and `fsdp_config.json`, `data.pt`, and then
the tracker.

Does not import torch, because the launcher, `health` and the monitor read checkpoints too.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_ext.errors import first_line_of
from verl_ext.files import LATEST, file_digest, ignore_progress, parse_json, replace_file

MANIFEST = "manifest.json"
PLAN = "export_plan.json"
OURS = (MANIFEST, PLAN)
"""Files that this pipeline writes into a checkpoint and verl does not."""
TRACKER = "latest_checkpointed_iteration.txt"
EXPORT = "huggingface"
INDEX = "model.safetensors.index.json"
"""File of an export with several weight files; says which of them holds a tensor."""
ADAPTER = "lora_adapter"
"""Directory of LoRA adapters in a checkpoint, with verl's name."""
DERIVED = (f"{EXPORT}/", f"{ADAPTER}/")
"""Directories of files that are derived from the shards, so that a run resumes without them."""
BEST = "best_checkpoint.json"
KEEP = "keep"
DATA_STATE = "data.pt"
FSDP_CONFIG = "fsdp_config.json"
KINDS = MODEL, OPTIMIZER, EXTRA = ("model", "optim", "extra_state")
"""Kinds of shards, by the first word of their file names."""
DROPPED_OPTIMIZER = "optimizer"
"""Entry in `Manifest.dropped` of a checkpoint without optimizer shards."""
MAX_DIGITS = 18
"""Maximum number of digits in a tracker or a manifest; a longer number means damage and is not a valid step."""
CHUNK_BYTES = 16 << 20
_SHARD = re.compile(rf"({'|'.join(KINDS)})_world_size_(\d+)_rank_(\d+)\.pt")

_ERRORS_OF_DAMAGE = {
    None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL,
}  # fmt: skip
"""`errno` of errors that show damage. Others, such as ESTALE on NFS, say nothing about a file's content."""

FileEntry = dict[str, Any]
"""Size (`bytes`) and digest (`xxh3_128`) of a file."""


# File names


def step_of(directory: Path) -> int | None:
    """N of `global_step_N`; None for any other name."""
    match = re.fullmatch(r"global_step_(\d+)", directory.name)
    return int(match.group(1)) if match else None


def shard_name(kind: str, world_size: int, rank: int) -> str:
    """verl's file name for a rank's shard."""
    return f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def shards_of(checkpoint: Path, *kinds: str) -> dict[Path, tuple[str, int, int]]:
    """Kind, world size and rank of all shards of these kinds (by default all kinds), by path."""
    matches = {path: _SHARD.fullmatch(path.name) for path in checkpoint.glob("*_world_size_*_rank_*.pt")}
    found = {path: (match[1], int(match[2]), int(match[3])) for path, match in matches.items() if match}
    return {path: shard for path, shard in found.items() if shard[0] in (kinds or KINDS)}


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Every `global_step_N` directory of a run, complete or not, newest first."""
    if not run_dir.is_dir():
        return []
    found = [path for path in run_dir.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: -(step_of(path) or 0))


class UnreadableError(ValueError):
    """A file of a checkpoint cannot be read at the moment, but may be intact."""


def _read_error(error: OSError, message: str) -> ValueError:
    """The exception for a failed read; an `UnreadableError` unless the error shows damage."""
    return ValueError(message) if error.errno in _ERRORS_OF_DAMAGE else UnreadableError(message)


# The manifest


@dataclass(frozen=True)
class Manifest:
    """Content of `manifest.json`, which is written after all other files of a checkpoint.

    Attributes:
        step: number of completed training steps.
        world_size: number of ranks that wrote the shards.
        config_digest: digest of the run's configuration.
        files: size and digest by relative path.
        metrics: metrics of this step by name.
        dropped: contents that the checkpoint lacks, such as `DROPPED_OPTIMIZER`.
        deferred: contents that the next start of the run adds: `EXPORT` after a save with little time.
        time: time of the save, in seconds since 1970.
        optimizer: class of the saved optimizer, such as torch.optim.AdamW; empty if unknown.
        export_dtype: dtype of the run's own exports: bf16, fp16 or fp32; empty if unknown.
    """

    step: int
    world_size: int
    config_digest: str
    files: dict[str, FileEntry]
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    time: float = 0.0
    optimizer: str = ""
    export_dtype: str = ""
    deferred: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of the checkpoint in bytes."""
        return sum(entry["bytes"] for entry in self.files.values())

    @property
    def has_damaged_export(self) -> bool:
        """Whether `read_complete` found that files of the export are missing or have another size."""
        return EXPORT in self.deferred and bool(self.exported_weights)

    @property
    def export_entries(self) -> dict[str, FileEntry]:
        """The entries of the export in `files`; without weights if the checkpoint was saved without an export."""
        return {name: entry for name, entry in self.files.items() if name.startswith(f"{EXPORT}/")}

    @property
    def exported_weights(self) -> list[str]:
        """Paths of the weights in the export; empty if the checkpoint has none."""
        return [name for name in self.export_entries if name.endswith(".safetensors")]

    def with_files(self, files: dict[str, FileEntry]) -> Manifest:
        """A copy that lists other files."""
        return replace(self, files=files)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        files = dict(sorted(self.files.items()))
        return json.dumps({"format": 1, **asdict(self), "files": files}, indent=1) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Read a checkpoint's manifest, or derive it if verl wrote the checkpoint.

        Raises:
            UnreadableError: the files cannot be read at the moment.
            ValueError: the manifest is missing or malformed; the message gives the reason.
        """
        if is_verl_checkpoint(directory):
            try:
                return _parse({"step": step_of(directory), **_verl_manifest(directory)})
            except OSError as error:
                raise _read_error(error, f"its files cannot be read ({error})") from error
        try:
            return _parse(parse_json((directory / MANIFEST).read_bytes()))
        except FileNotFoundError:
            raise ValueError(f"it has no {MANIFEST}, so it was never completed") from None
        except KeyError as error:
            raise ValueError(f"its {MANIFEST} cannot be read (it lacks {error})") from error
        except OSError as error:
            raise _read_error(error, f"its {MANIFEST} cannot be read ({first_line_of(error)})") from error
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"its {MANIFEST} cannot be read ({first_line_of(error)})") from error


def _parse(content: dict[str, Any]) -> Manifest:
    """Build a manifest from parsed JSON, which may be damaged.

    Raises:
        KeyError, TypeError, AttributeError, OverflowError, ValueError: a key is missing or its value is invalid.
    """
    if not isinstance(content, dict) or not isinstance(content.get("files", {}), dict):
        raise ValueError("it is not a manifest")
    metrics, time = content.get("metrics", {}), content.get("time", 0.0)
    lists = {name: content.get(name, ()) for name in ("dropped", "deferred")}
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError("a metric is not a number")
    for key, names in lists.items():
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{key} is not a list of names")
    if not 0 <= time < LATEST:
        raise ValueError(f"time is {time!r}, not a time in seconds since 1970")
    for name in content["files"]:  # no file may be outside the checkpoint
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names the file {name}, which is not in the checkpoint")
        if b"\0" in os.fsencode(name):  # fsencode refuses all other invalid characters
            raise ValueError(f"{name!r} is not a valid file name")
    return Manifest(
        step=_whole_number(content, "step"),
        world_size=_whole_number(content, "world_size"),
        config_digest=str(content["config_digest"]),
        files={name: {**entry, "bytes": _whole_number(entry, "bytes")} for name, entry in content["files"].items()},
        metrics={name: float(value) for name, value in metrics.items()},
        dropped=tuple(lists["dropped"]),
        deferred=tuple(lists["deferred"]),
        time=float(time),
        optimizer=str(content.get("optimizer", "")),
        export_dtype=str(content.get("export_dtype", "")),
    )


def _whole_number(content: dict[str, Any], key: str) -> int:
    value = content[key]
    if type(value) is not int or not 0 <= value < 10**MAX_DIGITS:
        raise ValueError(f"{key} is {repr(value)[:40]}, not an integer of at most {MAX_DIGITS} digits")
    return value


# Completeness


def why_incomplete(directory: Path) -> str | None:
    """The reason why a directory is not a complete checkpoint; None if it is."""
    try:
        read_complete(directory)
    except ValueError as error:
        return str(error)
    return None


def has_export(checkpoint: Path) -> bool:
    """Whether `huggingface/` holds weights; it always holds the configuration and the tokenizer."""
    return any((checkpoint / EXPORT).glob("*.safetensors"))


def read_complete(directory: Path) -> Manifest:
    """Read the manifest of a complete checkpoint. Reads it only once, because rotation may remove it at any time.

    A checkpoint whose export is damaged is complete, because the shards contain everything to resume from. The export
    counts as deferred, so that the next start of the run writes it again.

    Raises:
        UnreadableError: its files cannot be read at the moment.
        ValueError: the checkpoint is not complete; the message gives the reason.
    """
    by_verl = is_verl_checkpoint(directory)
    if by_verl and step_of(directory) is None:
        raise ValueError("its name is not global_step_N, so the number of steps that verl completed is unknown")
    if by_verl and (problem := _why_verl_incomplete(directory)):
        raise ValueError(problem)
    manifest = Manifest.read(directory)
    if manifest.step != step_of(directory):
        raise ValueError(f"its manifest belongs to step {manifest.step}")
    if by_verl:
        return manifest
    errors = {name: error for name in manifest.files if (error := _why_not_whole(directory, manifest, name))}
    for name, error in errors.items():
        if not name.startswith(DERIVED):
            raise error
    is_damaged = bool(manifest.exported_weights) and not errors.keys().isdisjoint(manifest.export_entries)
    return replace(manifest, deferred=(EXPORT,)) if is_damaged else manifest


def _why_not_whole(directory: Path, manifest: Manifest, name: str) -> ValueError | None:
    """The error of a file that is missing, cannot be read or has the wrong size; None if it is intact."""
    try:
        size = (directory / name).stat().st_size
    except OSError as error:
        problem = "is missing" if error.errno in _ERRORS_OF_DAMAGE else "cannot be read"
        return _read_error(error, f"its file {name} {problem} ({error.strerror})")
    expected = manifest.files[name]["bytes"]
    return None if size == expected else ValueError(f"its file {name} has {size} bytes instead of {expected}")


def complete_checkpoints(run_dir: Path) -> dict[Path, Manifest]:
    """The complete checkpoints of a run with their manifests, newest first."""
    found = {}
    for path in list_checkpoints(run_dir):
        with suppress(ValueError):
            found[path] = read_complete(path)
    return found


def exported_checkpoints(
    run_dir: Path, skip: Callable[[Path, ValueError], None] = lambda path, error: None
) -> Iterator[tuple[Path, bool]]:
    """The complete checkpoints of a run that have an export or owe one, in the order of `newest_first`.

    Args:
        skip: called with each incomplete checkpoint and the error of `read_complete`.

    Yields:
        The checkpoint, and whether its export can be used. Otherwise, the export is damaged or the save skipped it, so
        that the next start of the run writes it.
    """
    for path in newest_first(run_dir, list_checkpoints(run_dir)):
        try:
            manifest = read_complete(path)
        except ValueError as error:
            skip(path, error)
            continue
        if EXPORT in manifest.deferred or has_export(path):
            yield path, EXPORT not in manifest.deferred


def committed_steps(run_dir: Path) -> list[int]:
    """Steps of a run's checkpoints that have a manifest, newest first; their files are not checked."""
    return [step_of(path) or 0 for path in list_checkpoints(run_dir) if (path / MANIFEST).is_file()]


# The tracker


def read_tracker(run_dir: Path, *, raise_unreadable: bool = False) -> tuple[Path | None, str | None]:
    """The checkpoint that the tracker names, or a description of what is wrong with the tracker.

    Args:
        raise_unreadable: whether to raise an `UnreadableError` instead if the tracker cannot be read at the moment.
    """
    try:
        text = (run_dir / TRACKER).read_bytes().decode(errors="replace").strip()
        if not text.isascii() or not text.isdigit() or len(text) > MAX_DIGITS:
            return None, "is empty" if not text else f"holds {text[:40]!r} instead of a step"
        directory = run_dir / f"global_step_{int(text)}"
        return (directory, None) if directory.is_dir() else (None, f"names {directory.name}, which does not exist")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None, "is missing"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        if raise_unreadable and error.errno not in _ERRORS_OF_DAMAGE:
            raise UnreadableError(f"its {TRACKER} {problem}") from error
        return None, problem


def write_tracker(run_dir: Path, step: int) -> None:
    """Write a step to the tracker, as the plain integer that verl's own tools read."""
    replace_file(run_dir / TRACKER, [str(step)])


def newest_first(run_dir: Path, checkpoints: Iterable[Path]) -> list[Path]:
    """Sort checkpoints of a run, newest first, with those that the run has abandoned last.

    A restart with `resume_mode=disable`, or a tracker that was set back by hand, abandons the later checkpoints. Later
    checkpoints that are newer than the tracker are not abandoned: a crash between the rename of a checkpoint and the
    update of the tracker leaves an older tracker.
    """
    ordered = sorted(checkpoints, key=lambda path: -(step_of(path) or 0))
    tracked, _ = read_tracker(run_dir)
    if tracked is None:
        return ordered
    step, written = step_of(tracked) or 0, (run_dir / TRACKER).stat().st_mtime
    return sorted(ordered, key=lambda path: (step_of(path) or 0) > step and _time_of_save(path) <= written)


def _time_of_save(path: Path) -> float:
    """Time of a checkpoint's save, in seconds since 1970; 0 if the manifest is damaged.

    It is infinite if the manifest cannot be read at the moment, so that the caller finds this out first.
    """
    try:
        return Manifest.read(path).time
    except UnreadableError:
        return math.inf
    except ValueError:
        return 0.0


# Damage


def damaged_files(
    checkpoint: Path,
    names: Iterable[str] | None = None,
    progress: Callable[[int], None] = ignore_progress,
    *,
    raise_unreadable: bool = False,
) -> dict[str, str]:
    """Read files of a checkpoint and find the damaged ones.

    Compares the files with the digests in the manifest. verl keeps no digests, but files of `torch.save` contain
    checksums.

    Args:
        checkpoint: a `global_step_N` directory.
        names: relative paths of the files to read; None reads all files in the manifest.
        progress: called with the size of each chunk that was read, in bytes.
        raise_unreadable: whether to raise an `UnreadableError` for a file that cannot be read at the moment; by
            default, it counts as damaged.

    Returns:
        A description of the damage for each damaged file, by relative path.

    Raises:
        ValueError: the manifest is missing or malformed.
    """
    files = Manifest.read(checkpoint).files
    names = list(files if names is None else names)
    by_verl = is_verl_checkpoint(checkpoint)
    found: dict[str, str] = {}
    for name in names:
        try:
            if by_verl:
                problem = _archive_damage(checkpoint / name, progress) if name.endswith(".pt") else None
            elif name in files:
                problem = _damage(checkpoint / name, files[name], progress)
            else:
                problem = "is not in the manifest"
        except UnreadableError as error:
            if raise_unreadable:
                raise UnreadableError(f"its file {name} {error}") from error
            problem = str(error)
        if problem is not None:
            found[name] = problem
    return found


def damaged_export_files(checkpoint: Path) -> dict[str, str]:
    """`damaged_files` of the export; empty without a manifest, such as for checkpoints of verl."""
    if not (checkpoint / MANIFEST).exists():
        return {}
    return damaged_files(checkpoint, Manifest.read(checkpoint).export_entries)


def _damage(path: Path, entry: FileEntry, progress: Callable[[int], None]) -> str | None:
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry.get("bytes"):
            return f"has {num_bytes} bytes instead of {entry.get('bytes')}"
        digest = file_digest(path, progress)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
        if error.errno in _ERRORS_OF_DAMAGE:
            return problem
        raise UnreadableError(problem) from error
    return None if digest == entry.get("xxh3_128") else f"has the digest {digest} instead of {entry.get('xxh3_128')}"


def _archive_damage(archive: Path, progress: Callable[[int], None]) -> str | None:
    """Check a file of `torch.save` against its own checksums."""
    try:
        with zipfile.ZipFile(archive) as file:
            for entry in file.infolist():
                with file.open(entry) as record:
                    while piece := record.read(CHUNK_BYTES):
                        progress(len(piece))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno in _ERRORS_OF_DAMAGE:
            return f"is damaged ({error})"
        raise UnreadableError(f"cannot be read ({error.strerror})") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        return f"is damaged ({error})"  # a flipped bit can also indicate compression or encryption
    return None


# Checkpoints that verl wrote


def is_verl_checkpoint(checkpoint: Path) -> bool:
    """Whether verl itself wrote, or started to write, a `global_step_N`; fast for checkpoints of this pipeline."""
    return not any(os.path.exists(checkpoint / name) for name in OURS) and bool(shards_of(checkpoint))


def _verl_manifest(checkpoint: Path) -> dict[str, Any]:
    """Derive a manifest from the files: sizes without digests, no metrics."""
    archives = [path for path in checkpoint.glob("*.pt") if path.is_file()]
    others = [checkpoint / FSDP_CONFIG, *(checkpoint / EXPORT).rglob("*")]
    shards = shards_of(checkpoint).values()
    kinds = {kind for kind, _, _ in shards}
    return {
        "world_size": max(world_size for _, world_size, _ in shards),
        "config_digest": "",
        "files": {
            str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size}
            for path in sorted(archives + others)
            if path.is_file()
        },
        "dropped": [name for name, kind in ((DROPPED_OPTIMIZER, OPTIMIZER), ("extra", EXTRA)) if kind not in kinds],
        "time": max(path.stat().st_mtime for path in archives),
    }


def _why_verl_incomplete(checkpoint: Path) -> str | None:
    """Why a checkpoint that verl wrote is not complete, as far as can be determined without reading all of it."""
    ranks: dict[str, set[int]] = defaultdict(set)
    shards = shards_of(checkpoint).values()
    for kind, _, rank in shards:
        ranks[kind].add(rank)
    world_sizes = sorted({world_size for _, world_size, _ in shards})
    if not world_sizes:  # removed in the meantime
        return "it has no shards"
    if len(world_sizes) > 1:
        return f"it holds shards of {' and of '.join(map(str, world_sizes))} ranks; remove those of one run"
    for kind in sorted(ranks, key=KINDS.index) if MODEL in ranks else [MODEL]:
        for rank in sorted(set(range(world_sizes[0])) - ranks[kind]):
            return f"its file {shard_name(kind, world_sizes[0], rank)} is missing"
    if not (checkpoint / DATA_STATE).exists() and len(ranks) < len(KINDS):
        return f"it has no {DATA_STATE}, which verl writes last, so the save was interrupted"
    cut = next((path.name for path in sorted(checkpoint.glob("*.pt")) if not _is_archive(path)), None)
    return None if cut is None else f"its file {cut} is truncated"


def _is_archive(path: Path) -> bool:
    """`zipfile.is_zipfile`, but raises errors of opening the file.

    Raises:
        UnreadableError: the file cannot be read at the moment.
        ValueError: the file is missing.
    """
    try:
        with path.open("rb") as file:
            return zipfile.is_zipfile(file)
    except OSError as error:
        raise _read_error(error, f"its files cannot be read ({error})") from error
