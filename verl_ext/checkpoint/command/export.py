"""`export`: makes `huggingface/` from a checkpoint's shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from tqdm import tqdm

from verl_ext.checkpoint.command.run_directory import add_run_command, newest_resumable, require_steps
from verl_ext.checkpoint.layout import step_of
from verl_ext.command_line import Commands
from verl_ext.errors import UserError

TEXT = (
    "Make the Hugging Face model of a checkpoint from its shards. Needs no GPU and no process group, merges LoRA "
    "adapters, and keeps one tensor in memory at a time; shards that verl itself wrote serve too. RUN_DIR may also be "
    "a checkpoint, a global_step_N directory."
)


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_run_command(commands, "export", TEXT, run, more="--step 750 --output models/mine")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint (default: the newest complete one)")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16", help="number type (default: bf16)")
    parser.add_argument("--max-shard-gib", type=_positive, default=5.0, metavar="G", help="of one file (default: 5)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new directory (default: into the checkpoint)")


def run(arguments: argparse.Namespace) -> int:
    """Write the export and say where it is."""
    from verl_ext.checkpoint.rebuild import (  # here, so that --help need not wait for torch
        bytes_to_read,
        rebuild_export,
    )

    checkpoint = _choose(arguments.run_dir, arguments.step)
    total = bytes_to_read(checkpoint)
    with tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=None) as bar:
        target = rebuild_export(checkpoint, arguments.output, arguments.dtype, arguments.max_shard_gib, bar.update)
    print(f"{target}: the weights of {checkpoint.name} in {arguments.dtype}, loadable by transformers and vLLM")
    return 0


def _choose(run_dir: Path, step: int | None) -> Path:
    if step_of(run_dir.resolve()) is not None and step is None:
        return run_dir.resolve()
    if not run_dir.is_dir():
        raise UserError(f"{run_dir} is not a directory; name the directory of a run or a global_step_N in it")
    if step is not None:
        return require_steps(run_dir, [step])[0]
    newest = newest_resumable(run_dir)
    if newest is None:
        raise UserError(f"{run_dir} holds no complete checkpoint; name one whose model shards are whole with --step N")
    return newest


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no size above 0")
    return value


_positive.__name__ = "number"  # argparse names the type function in its message
