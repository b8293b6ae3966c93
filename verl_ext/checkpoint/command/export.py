"""`export`: makes `huggingface/` from a checkpoint's shards."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl_ext.checkpoint.command.run_directory import add_run_command, newest_resumable, require_steps
from verl_ext.checkpoint.layout import step_of
from verl_ext.cli import Commands, FloatArg, IntArg
from verl_ext.commands import typed_command
from verl_ext.console import print_summary, progress_bar, typed_path
from verl_ext.errors import UserError

TEXT = (
    "Make the Hugging Face model of a checkpoint from its shards. Needs no GPU and no process group, merges LoRA "
    "adapters, and keeps one tensor in memory at a time; shards that verl itself wrote serve too. RUN_DIR may also be "
    "a checkpoint, a global_step_N directory."
)


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_run_command(commands, "export", TEXT, run, more="--step 750 --output models/mine")
    parser.add_argument("--step", type=IntArg(0), help="the checkpoint (default: the newest complete one)")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp16", "fp32"), help="number type (default: that of the run's own exports)"
    )
    parser.add_argument("--max-shard-gib", type=FloatArg(), default=5.0, metavar="G", help="of one file (default: 5)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="a new directory (default: into the checkpoint)")


def run(arguments: argparse.Namespace) -> int:
    """Write the export and say where it is."""
    checkpoint = _choose(arguments.run_dir, arguments.step)
    # here, as torch takes seconds to import
    from verl_ext.checkpoint.rebuild import bytes_to_read, export_dtype_of, rebuild_export

    dtype, total = arguments.dtype or export_dtype_of(checkpoint), bytes_to_read(checkpoint)
    with progress_bar(total=total, desc="exporting", unit="B") as bar:
        target = rebuild_export(checkpoint, arguments.output, dtype, arguments.max_shard_gib, bar.update)
    then = [*typed_command("eval"), "run", "--checkpoint", typed_path(target)]
    print_summary(f"Exported: {checkpoint.name}", {"model": target, "number type": dtype}, then)
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
