"""Names and completeness of checkpoint directories. Standard library only, so that the launcher can ask too."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.stock import OURS, content_of, is_stock, what_is_wrong_with_stock

MANIFEST, PLAN = OURS
TRACKER = "latest_checkpointed_iteration.txt"
EXPORT = "huggingface"
BEST = "best_checkpoint.json"
KEEP = "keep"


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
    """

    step: int
    world_size: int
    config_digest: str
    files: dict[str, dict[str, Any]]
    metrics: dict[str, float] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    time: float = 0.0

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
            return manifest_of({"step": step_of(directory), **content_of(directory)})
        try:
            return manifest_of(json.loads((directory / MANIFEST).read_text()))
        except FileNotFoundError:
            raise ValueError(f"it has no {MANIFEST}, so it was never completed") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its {MANIFEST} cannot be read ({error!r})") from error


def manifest_of(content: dict[str, Any]) -> Manifest:
    """A manifest from its JSON; raises whatever a wrong key or type leads to, and for a file outside a `ValueError`."""
    for name in content["files"]:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"it names the file {name}, which is not in the checkpoint")
    return Manifest(
        step=int(content["step"]),
        world_size=int(content["world_size"]),
        config_digest=str(content["config_digest"]),
        files={name: {**entry, "bytes": int(entry["bytes"])} for name, entry in content["files"].items()},
        metrics=dict(content.get("metrics", {})),
        dropped=tuple(content.get("dropped", ())),
        time=float(content.get("time", 0.0)),
    )


def step_of(directory: Path) -> int | None:
    """N of `global_step_N`, None for any other name."""
    match = re.fullmatch(r"global_step_(\d+)", directory.name)
    return int(match.group(1)) if match else None


def what_is_wrong(directory: Path) -> str | None:
    """Why a directory is not a complete checkpoint, or None when it is one."""
    if is_stock(directory):
        return what_is_wrong_with_stock(directory)
    try:
        manifest = Manifest.read(directory)
    except ValueError as error:
        return str(error)
    if manifest.step != step_of(directory):
        return f"its manifest is that of step {manifest.step}"
    for name, entry in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            return f"its file {name} is missing ({error.strerror})"
        if size != entry["bytes"]:
            return f"its file {name} has {size} bytes instead of {entry['bytes']}"
    return None


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
    text = path.read_bytes().decode(errors="replace").strip()
    if not text.isascii() or not text.isdigit():
        return None, "is empty" if not text else f"holds {text[:40]!r} instead of a step"
    directory = run_dir / f"global_step_{int(text)}"
    return (directory, None) if directory.is_dir() else (None, f"names {directory.name}, which does not exist")
