"""Checkpoints as verl itself writes them: what they hold and whether they are whole, read off their files.

verl writes straight into `global_step_N`, in this order: each rank's shards, rank 0's `huggingface/` and
`fsdp_config.json`, `data.pt`, and then the tracker. Standard library only, so that the launcher can ask too.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OURS = ("manifest.json", "export_plan.json")
"""What this pipeline writes into a checkpoint and verl does not."""
KINDS = ("model", "optim", "extra_state")
SHARD = re.compile(rf"({'|'.join(KINDS)})_world_size_(\d+)_rank_(\d+)\.pt")
DATA_STATE = "data.pt"
FSDP_CONFIG = "fsdp_config.json"
WHY_KEPT = "verl itself wrote it"
CHUNK_BYTES = 16 << 20
"""Read, digested or handed to the disk at a time."""


def is_stock(checkpoint: Path) -> bool:
    """Whether verl itself wrote a `global_step_N`, or began to; cheap for one of this pipeline's."""
    return not any((checkpoint / name).exists() for name in OURS) and next(_shards(checkpoint), None) is not None


def content_of(checkpoint: Path) -> dict[str, Any]:
    """What a manifest would say of a checkpoint that verl wrote: sizes without digests, no metrics."""
    archives = [path for path in checkpoint.glob("*.pt") if path.is_file()]
    others = [checkpoint / FSDP_CONFIG, *(checkpoint / "huggingface").rglob("*")]
    shards = list(_shards(checkpoint))
    kinds = {kind for kind, _, _ in shards}
    return {
        "world_size": max(world_size for _, world_size, _ in shards),
        "config_digest": "",
        "files": {
            str(path.relative_to(checkpoint)): {"bytes": path.stat().st_size}
            for path in sorted(archives + others)
            if path.is_file()
        },
        "dropped": [name for name, kind in (("optimizer", "optim"), ("extra", "extra_state")) if kind not in kinds],
        "time": max(path.stat().st_mtime for path in archives),
    }


def what_is_wrong_with_stock(checkpoint: Path) -> str | None:
    """Why a checkpoint that verl wrote is not whole, None where nothing is seen without reading all of it."""
    ranks: dict[str, set[int]] = defaultdict(set)
    world_sizes = set()
    for kind, world_size, rank in _shards(checkpoint):
        ranks[kind].add(rank)
        world_sizes.add(world_size)
    if len(world_sizes) > 1:
        return f"it holds shards of {' and of '.join(map(str, sorted(world_sizes)))} ranks; remove those of one run"
    (world_size,) = world_sizes
    for kind in sorted(ranks, key=KINDS.index) if "model" in ranks else ["model"]:
        for rank in sorted(set(range(world_size)) - ranks[kind]):
            return f"its file {kind}_world_size_{world_size}_rank_{rank}.pt is missing"
    if not (checkpoint / DATA_STATE).exists() and len(ranks) < len(KINDS):
        return f"it has no {DATA_STATE}, which verl writes last, so its save was cut short"
    cut = next((path.name for path in sorted(checkpoint.glob("*.pt")) if not zipfile.is_zipfile(path)), None)
    return None if cut is None else f"its file {cut} is cut short"


def what_is_wrong_inside(archive: Path, progress: Callable[[int], None]) -> str | None:
    """Why a file that `torch.save` wrote is not what was written, by the checksums in it; None where it is.

    Args:
        archive: read from the start to the end.
        progress: told the number of bytes of each piece that was read.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            for entry in file.infolist():
                with file.open(entry) as record:
                    while piece := record.read(CHUNK_BYTES):
                        progress(len(piece))
    except FileNotFoundError:
        return "is missing"
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
        return f"is damaged ({error})"  # a flipped bit may also claim a compression or an encryption
    return None


def _shards(checkpoint: Path) -> Iterator[tuple[str, int, int]]:
    """Kind, world size and rank of each shard."""
    for path in checkpoint.glob("*_world_size_*_rank_*.pt"):
        if match := SHARD.fullmatch(path.name):
            yield match[1], int(match[2]), int(match[3])
