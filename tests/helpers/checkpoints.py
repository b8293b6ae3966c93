"""Creates small checkpoints, and copies, damages and compares checkpoints. torch is imported only where needed."""

from __future__ import annotations

import io
import shutil
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from verl_ext.checkpoint.config import CheckpointConfig
from verl_ext.checkpoint.manifest import TRACKER, Manifest, list_checkpoints

if TYPE_CHECKING:
    import torch

OPTIMIZER = [f"optim_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
NAMES = ["model_world_size_2_rank_0.pt", "huggingface/config.json", *OPTIMIZER]
"""Files of a checkpoint that `save` writes."""


def save(run_dir: Path, step: int, **losses: float) -> Path:
    """Commit a checkpoint of four text files as the trainer does; `val=1.0` is its `val/loss`."""
    import xxhash

    from verl_ext.checkpoint.save import commit_directory

    temporary = run_dir / f"global_step_{step}.tmp"
    (temporary / "huggingface").mkdir(parents=True)
    files = {}
    for name in NAMES:
        content = f"{name} of step {step}".encode()
        (temporary / name).write_bytes(content)
        files[name] = {"bytes": len(content), "xxh3_128": xxhash.xxh3_128(content).hexdigest()}
    metrics = {f"{kind}/loss": value for kind, value in losses.items()}
    final = run_dir / f"global_step_{step}"
    commit_directory(temporary, final, Manifest(step, 2, "digest", files, metrics, time=time.time()))
    return final


def retention(max_to_keep: int | None, *, keep_best: int = 0, **settings: Any) -> tuple[int | None, CheckpointConfig]:
    """The settings of rotation."""
    return max_to_keep, CheckpointConfig(keep_best=keep_best, **settings)


def kept(run_dir: Path) -> list[int]:
    """The steps of a run's checkpoints."""
    return sorted(int(path.name.removeprefix("global_step_")) for path in list_checkpoints(run_dir))


def checkpoint_command(*words: str | Path | int, code: int = 0) -> str:
    """Run `python -m verl_ext.checkpoint` in this process.

    Args:
        words: its arguments.
        code: the expected exit code.

    Returns:
        Its standard error with code 2, its standard output with any other.
    """
    from verl_ext.checkpoint.__main__ import main

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), patch("sys.stdin", io.StringIO()):
        try:
            found = main(list(map(str, words)))
        except SystemExit as left:
            found = left.code
    assert found == code, out.getvalue() + err.getvalue()
    return err.getvalue() if code == 2 else out.getvalue()


def make_export(path: Path) -> Path:
    """A Hugging Face export that is complete, with one weight of 64 numbers."""
    import numpy as np
    from safetensors.numpy import save_file

    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    save_file({"w": np.zeros(64, np.float32)}, path / "model.safetensors")
    return path


def commit(run_dir: Path, step: int, export: Path | None = None) -> Path:
    """Add a complete checkpoint to a run, in one rename as the trainer does.

    Args:
        run_dir: the run.
        step: step of the checkpoint.
        export: copied into it; None for a small one with a shard.

    Returns:
        The checkpoint's directory.
    """
    from verl_ext.checkpoint.save import sync_and_digest

    directory = run_dir / f"global_step_{step}.tmp"
    if export is None:
        make_export(directory / "huggingface")
        (directory / "model.pt").write_text("shard")
    else:
        shutil.copytree(export, directory / "huggingface")
    paths = [path for path in directory.rglob("*") if path.is_file()]
    files = {str(path.relative_to(directory)): sync_and_digest(path) for path in paths}
    manifest = Manifest(step, world_size=1, config_digest="", files=files, time=time.time())
    (directory / "manifest.json").write_text(manifest.to_json())
    return directory.rename(run_dir / f"global_step_{step}")


def copy_checkpoints(source: Path, run_dir: Path, *steps: int) -> None:
    """Copy checkpoints into a run directory, which may not exist yet; the tracker names the last of them."""
    for step in steps:
        shutil.copytree(source / f"global_step_{step}", run_dir / f"global_step_{step}")
    (run_dir / TRACKER).write_text(str(steps[-1]))


def flip_byte(path: Path) -> None:
    """Change one byte in the middle of a file and keep its size; among the numbers `torch.load` does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Truncate a file to half of its size."""
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """Check that all tensors of the shards, including RNG states, and all bytes of the export are equal."""
    import torch

    for path in one.glob("*_rank_*.pt"):
        # The files themselves differ: pickle notes which of the equal objects are the same one.
        mine, others = (tensors_of(torch.load(d / path.name, weights_only=False)) for d in (one, other))
        assert len(mine) == len(others)
        assert all(map(torch.equal, mine, others)), path.name
    for path in (one / "huggingface").iterdir():
        assert path.read_bytes() == (other / "huggingface" / path.name).read_bytes(), path.name


def tensors_of(state: Any) -> list[torch.Tensor]:
    """The tensors in nested state, in order; of a sharded tensor, the part that the saving rank held."""
    import torch

    from verl_ext.distributed import to_local

    if isinstance(state, torch.Tensor):
        return [to_local(state)]
    if isinstance(state, dict):
        return tensors_of(list(state.values()))
    return [tensor for item in state for tensor in tensors_of(item)] if isinstance(state, list | tuple) else []
