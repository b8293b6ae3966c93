"""Checkpoints: small ones made by hand, damage, and comparison."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from verl_ext.checkpoint.layout import Manifest
from verl_ext.checkpoint.shards import local_part
from verl_ext.checkpoint.writing import flush_and_digest


def make_export(path: Path) -> Path:
    """A Hugging Face export that is complete, with one weight of three numbers."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    save_file({"w": np.zeros(3, np.float32)}, path / "model.safetensors")
    return path


def commit(run_dir: Path, step: int, export: Path | None = None) -> Path:
    """Add a complete checkpoint to a run, in one rename as the trainer does.

    Args:
        run_dir: the run.
        step: of the checkpoint.
        export: copied into it; None for a small one with a shard.

    Returns:
        The checkpoint's directory.
    """
    directory = run_dir / f"global_step_{step}.tmp"
    if export is None:
        make_export(directory / "huggingface")
        (directory / "model.pt").write_text("shard")
    else:
        shutil.copytree(export, directory / "huggingface")
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {str(path.relative_to(directory)): flush_and_digest(path) for path in paths}
    manifest = Manifest(step, world_size=1, config_digest="", files=files, time=time.time())
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory.rename(run_dir / f"global_step_{step}")


def flip_byte(path: Path) -> None:
    """Change one byte in the middle of a file and keep its size; among the numbers `torch.load` does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Cut a file to half of its size."""
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Every tensor of the shards, random states included, and every byte of the export are the same."""
    for path in one.glob("*_rank_*.pt"):
        # The files themselves differ: pickle notes which of the equal objects are the same one.
        mine, others = (tensors_of(torch.load(d / path.name, weights_only=False)) for d in (one, other))
        assert len(mine) == len(others)
        assert all(map(torch.equal, mine, others)), path.name
    for path in (one / "huggingface").iterdir():
        assert path.read_bytes() == (other / "huggingface" / path.name).read_bytes(), path.name


def tensors_of(state: Any) -> list[torch.Tensor]:
    """The tensors in nested state, in order; of a sharded tensor, the part that the saving rank held."""
    if isinstance(state, torch.Tensor):
        return [local_part(state)]
    if isinstance(state, dict):
        return tensors_of(list(state.values()))
    return [tensor for item in state for tensor in tensors_of(item)] if isinstance(state, list | tuple) else []
