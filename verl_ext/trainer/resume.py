"""The choice of the checkpoint to go on from: rank 0 picks, all ranks check its digests together."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl_ext.checkpoint.commit import point_tracker
from verl_ext.checkpoint.layout import EXPORT, Manifest, read_tracker, step_of
from verl_ext.checkpoint.resume import (
    CONTENTS,
    contents_to_load,
    find_checkpoint,
    optimizer_name,
    require_same_optimizer,
)
from verl_ext.checkpoint.verify import damaged_files
from verl_ext.console import print_line, warn
from verl_ext.data.sampler import VERL_ORDER_SEED, position_after_verl
from verl_ext.distributed import gather_results, on_rank_zero
from verl_ext.errors import UserError
from verl_ext.trainer.stages import RunConfig


def checkpoint_to_resume(config: RunConfig) -> Path | None:
    """Pick the newest checkpoint whose files are what was written, and say so in verl's words; collective.

    Args:
        config: the resolved configuration.

    Raises:
        UserError: see `find_checkpoint` and `require_same_optimizer`.
    """
    trainer = config.trainer
    with_optimizer = "optimizer" in trainer.checkpoint.load_contents
    damaged: dict[Path, str] = {}
    warn_once = cache(warn)  # the choice is made again after each damaged checkpoint, and finds the same then

    def pick() -> Path | None:
        return find_checkpoint(
            Path(trainer.default_local_dir),
            trainer.resume_mode,
            trainer.resume_from_path,
            warn_once,
            with_optimizer=with_optimizer,
            damaged=damaged,
        )

    while (path := on_rank_zero(pick)) is not None and trainer.checkpoint.verify:
        problems = verify_together(path)
        if not problems:
            break
        damaged[path] = next(f"its file {name} {problem}" for name, problem in sorted(problems.items()))
    if path is not None:
        if with_optimizer:
            on_rank_zero(lambda: require_same_optimizer(path, optimizer_name(config.optim)))
        on_rank_zero(lambda: catch_up_tracker(path, Path(trainer.default_local_dir)))
    if path is not None and dist.get_rank() == 0:
        print_line(f"Found checkpoint: {path.absolute()}", sys.__stdout__)
    return path


def contents_to_resume(checkpoint: Path, config: RunConfig) -> list[str]:
    """See `contents_to_load`; rank 0 tells the user where it is not all, or more than was asked for; collective."""

    def choose() -> list[str]:
        asked = list(config.trainer.checkpoint.load_contents)
        contents = contents_to_load(checkpoint, config.trainer, optimizer_name(config.optim))
        loaded = ", ".join(name for name in CONTENTS if name in contents)
        if contents != asked:
            print_line(
                f"Loading {loaded} from {checkpoint.name}, which this run saved; to load only "
                f"trainer.checkpoint.load_contents=[{','.join(asked)}] of it, name it in trainer.resume_from_path",
                sys.__stdout__,
            )
        elif not set(CONTENTS) <= set(asked):
            print_line(
                f"Loading only {loaded} from {checkpoint.name} (trainer.checkpoint.load_contents)", sys.__stdout__
            )
        return contents

    return on_rank_zero(choose)


def catch_up_tracker(checkpoint: Path, run_dir: Path) -> None:
    """Point the tracker at a checkpoint that is newer: if it is the last one of the run, no later save would do it."""
    tracked, step = read_tracker(run_dir)[0], step_of(checkpoint) or 0
    if checkpoint.parent == run_dir and (tracked is None or (step_of(tracked) or 0) < step):
        point_tracker(run_dir, step)


def verify_together(checkpoint: Path) -> dict[str, str]:
    """What is wrong with the files that are loaded, by name; each rank reads some of them; collective."""

    def damaged_of_mine() -> dict[str, str]:
        files = Manifest.read(checkpoint).files
        names = sorted(
            (name for name in files if not name.startswith(f"{EXPORT}/")), key=lambda name: -files[name]["bytes"]
        )
        return damaged_files(checkpoint, names[dist.get_rank() :: dist.get_world_size()])

    found = gather_results(damaged_of_mine)
    return {name: problem for problems in found for name, problem in problems.items()}


def data_state_after_verl(
    checkpoint: Path, loader_state: dict[str, Any], num_samples: int, config: RunConfig
) -> dict[str, Any]:
    """The position in the data of a checkpoint that verl wrote, as this pipeline saves it; rank 0 tells what goes on.

    Args:
        checkpoint: a `global_step_N`.
        loader_state: its `data.pt`; empty where there is none.
        num_samples: of the data set.
        config: the resolved configuration.

    Raises:
        UserError: this pipeline wrote the checkpoint, whose manifest and export plan are lost.
    """
    if "samples_seen" in loader_state:
        raise UserError(f"{checkpoint} lost its manifest.json; restore it, or name another checkpoint to resume from")
    num_saved_ranks = max(Manifest.read(checkpoint).world_size // config.sequence_parallel_size, 1)
    batch_size = config.data.train_batch_size
    position = position_after_verl(loader_state, step_of(checkpoint) or 0, num_samples, batch_size, num_saved_ranks)
    if dist.get_rank() == 0:
        print_line(
            f"verl itself wrote {checkpoint.name}; this run continues in verl's order of the data, "
            f"{position.samples_seen} of {num_samples} samples into epoch {position.epoch}, and removes none of verl's "
            "checkpoints",
            sys.__stdout__,
        )
        if position.doubt is not None:
            warn(f"{checkpoint.name}: {position.doubt}")
    return {
        "epoch": position.epoch,
        "samples_seen": position.samples_seen,
        "num_samples": num_samples,
        "seed": config.trainer.seed,
        "order_seed": VERL_ORDER_SEED,
    }
