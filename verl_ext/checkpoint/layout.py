"""Names and completeness of checkpoint directories. Standard library only, so that the launcher can ask too."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.stock import OURS, content_of, is_stock, what_is_wrong_with_stock
from verl_ext.errors import first_line_of
from verl_ext.files import LATEST, parse_json

MANIFEST, PLAN = OURS
TRACKER = "latest_checkpointed_iteration.txt"
EXPORT = "huggingface"
BEST = "best_checkpoint.json"
KEEP = "keep"
MOST_DIGITS = 18
"""Most digits of a number in a tracker or a manifest; a longer number is damage and names no directory."""


@dataclass(frozen=True)
class Manifest:
    """What a complete checkpoint says of itself.

    Attributes:
        step: optimizer steps done.
        world_size: ranks that wrote the shards.
        config_digest: digest of the run's configuration.
        files: relative path to size in bytes and digest.
        metrics: figures of this step, by metric name.
        dropped: what was removed on purpose after the save; "optimizer" or nothing.
        time: seconds since 1970 of the save.
        optimizer: whose state the shards hold, such as torch.optim.AdamW; empty where that is not known.
        export_dtype: bf16, fp16 or fp32, the number type of the run's own exports; empty where that is not known.
    """

    step: int
    world_size: int
    config_digest: str
    files: dict[str, dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    time: float = 0.0
    optimizer: str = ""
    export_dtype: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of the checkpoint on the disk."""
        return sum(entry["bytes"] for entry in self.files.values())

    def with_files(self, files: dict[str, dict[str, Any]]) -> Manifest:
        """The same with another list of files."""
        return replace(self, files=files)

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        files = dict(sorted(self.files.items()))
        return json.dumps({"format": 1, **asdict(self), "files": files}, indent=1) + "\n"

    @staticmethod
    def read(directory: Path) -> Manifest:
        """Read a checkpoint's manifest; one that verl wrote has none, and its files say what they can.

        Raises:
            ValueError: it is missing or malformed; the message says which.
        """
        if is_stock(directory):
            try:
                return manifest_of({"step": step_of(directory), **content_of(directory)})
            except OSError as error:
                raise ValueError(f"its files cannot be read ({error})") from error
        try:
            return manifest_of(parse_json((directory / MANIFEST).read_bytes()))
        except FileNotFoundError:
            raise ValueError(f"it has no {MANIFEST}, so it was never completed") from None
        except KeyError as error:
            raise ValueError(f"its {MANIFEST} cannot be read (it lacks {error})") from error
        except (OSError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"its {MANIFEST} cannot be read ({first_line_of(error)})") from error


def manifest_of(content: dict[str, Any]) -> Manifest:
    """A manifest from its JSON, which may be damaged.

    Raises:
        KeyError, TypeError, AttributeError, OverflowError, ValueError: a key is missing or its value cannot be one.
    """
    metrics, dropped, time = content.get("metrics", {}), content.get("dropped", ()), content.get("time", 0.0)
    if not all(type(value) in (int, float) for value in metrics.values()):
        raise ValueError("a metric is not a number")
    if isinstance(dropped, str) or not all(isinstance(name, str) for name in dropped):
        raise ValueError("dropped is not a list of names")
    if not 0 <= time < LATEST:
        raise ValueError(f"time is {time!r}, not a time in seconds since 1970")
    for name in content["files"]:
        _require_name(name)
    return Manifest(
        step=_whole(content, "step"),
        world_size=_whole(content, "world_size"),
        config_digest=str(content["config_digest"]),
        files={name: {**entry, "bytes": _whole(entry, "bytes")} for name, entry in content["files"].items()},
        metrics={name: float(value) for name, value in metrics.items()},
        dropped=tuple(dropped),
        time=float(time),
        optimizer=str(content.get("optimizer", "")),
        export_dtype=str(content.get("export_dtype", "")),
    )


def _whole(content: dict[str, Any], key: str) -> int:
    value = content[key]
    if type(value) is not int or not 0 <= value < 10**MOST_DIGITS:
        raise ValueError(f"{key} is {repr(value)[:40]}, not a whole number of at most {MOST_DIGITS} digits")
    return value


def _require_name(name: str) -> None:
    """Refuse what no file of a checkpoint can be called."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"it names the file {name}, which is not in the checkpoint")
    if b"\0" in os.fsencode(name):  # which refuses the other characters that no name can have
        raise ValueError(f"{name!r} is not a valid file name")


def step_of(directory: Path) -> int | None:
    """N of `global_step_N`, None for any other name."""
    match = re.fullmatch(r"global_step_(\d+)", directory.name)
    return int(match.group(1)) if match else None


def what_is_wrong(directory: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None when it is one."""
    try:
        read_complete(directory)
    except ValueError as error:
        return str(error)
    return None


def read_complete(directory: Path) -> Manifest:
    """Read the manifest of a complete checkpoint; it is read once, since a rotation may remove it at any moment.

    Raises:
        ValueError: it is not complete; the message says why.
    """
    if is_stock(directory) and step_of(directory) is None:
        raise ValueError("its name is not global_step_N, from which the number of steps that verl had done is read")
    if is_stock(directory) and (problem := what_is_wrong_with_stock(directory)):
        raise ValueError(problem)
    manifest = Manifest.read(directory)
    if manifest.step != step_of(directory):
        raise ValueError(f"its manifest is that of step {manifest.step}")
    for name, entry in manifest.files.items() if not is_stock(directory) else ():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise ValueError(f"its file {name} is missing ({error.strerror})") from error
        if size != entry["bytes"]:
            raise ValueError(f"its file {name} has {size} bytes instead of {entry['bytes']}")
    return manifest


def read_all_complete(run_dir: Path) -> dict[Path, Manifest]:
    """The complete checkpoints of a run with their manifests, the newest first."""
    found = {}
    for path in list_steps(run_dir):
        with suppress(ValueError):
            found[path] = read_complete(path)
    return found


def list_steps(run_dir: Path) -> list[Path]:
    """Every `global_step_N` directory of a run, complete or not, the newest first."""
    if not run_dir.is_dir():
        return []
    found = [path for path in run_dir.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: -(step_of(path) or 0))


def complete_steps(run_dir: Path) -> list[int]:
    """Steps of a run's complete checkpoints, the newest first; sizes and digests are not looked at."""
    return [step_of(path) or 0 for path in list_steps(run_dir) if (path / MANIFEST).is_file()]


def read_tracker(run_dir: Path) -> tuple[Path | None, str | None]:
    """The checkpoint that the tracker names, and what is wrong with the tracker where it names none."""
    path = run_dir / TRACKER
    if not path.is_file():
        return None, "is missing"
    try:
        text = path.read_bytes().decode(errors="replace").strip()
    except OSError as error:
        return None, f"cannot be read ({error.strerror})"
    if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS:
        return None, "is empty" if not text else f"holds {text[:40]!r} instead of a step"
    directory = run_dir / f"global_step_{int(text)}"
    return (directory, None) if directory.is_dir() else (None, f"names {directory.name}, which does not exist")
