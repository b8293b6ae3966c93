"""Exports that have every file of one and a weight of three numbers, alone or in complete checkpoints of a run."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from verl_ext.checkpoint.layout import Manifest
from verl_ext.checkpoint.writing import flush_and_digest


def make_export(path: Path) -> Path:
    """An export that is whole, as far as that shows without loading it."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    save_file({"w": np.zeros(3, np.float32)}, path / "model.safetensors")
    return path


def commit(run_dir: Path, step: int) -> Path:
    """A complete checkpoint with an export."""
    checkpoint = run_dir / f"global_step_{step}"
    export = make_export(checkpoint / "huggingface")
    (checkpoint / "model.pt").write_text("shard")
    paths = [*export.iterdir(), checkpoint / "model.pt"]
    files = {str(path.relative_to(checkpoint)): flush_and_digest(path) for path in paths}
    manifest = Manifest(step, world_size=1, config_digest="", files=files, time=time.time())
    (checkpoint / "manifest.json").write_text(manifest.to_json())
    return checkpoint


def flip_a_byte(path: Path) -> None:
    """Damage a file and keep its size."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
