"""What torchrun starts on every rank: `python -m verl_ext.trainer CONFIG.yaml`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_ext.command_line import process_words
from verl_ext.errors import USER_ERROR_EXIT_CODE, UserError
from verl_ext.metrics.startup import process_start, startup
from verl_ext.parent_death import end_with_parent
from verl_ext.quick_imports import quick_imports
from verl_ext.trainer.stop_signals import RankSignals, end_at_once


def main() -> None:
    """Train the stage of the configuration; a `UserError` goes to the launcher, which prints it once."""
    [path] = process_words("verl_ext.trainer", "Trains as one rank of torchrun.", "bash run_sft.sh 2", "config")
    die_with_launcher()
    end_at_once()
    startup.go_on(Path(path).parent)
    startup.mark("torchrun", process_start())
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)  # the launcher wrote it
    OmegaConf.set_struct(config, True)
    try:
        train(config)
    except UserError as error:
        tell_launcher(str(error))
        sys.exit(USER_ERROR_EXIT_CODE)


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies.

    torchrun gives each rank a session of its own, so a launcher killed by SIGKILL would leave ranks that go on training
    into a run directory which the next start of the same command takes over.
    """
    launcher = os.getppid()
    end_with_parent()
    if os.getppid() != launcher:  # it died before the kernel was told
        os._exit(1)


def tell_launcher(message: str) -> None:
    """Leave a message in the file that torchrun reads after a rank has failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        print(f"error: {message}", file=sys.stderr)
    else:
        Path(path).write_text(json.dumps({"message": message}))


def train(config: DictConfig) -> None:
    """Build the ranks, the data and the trainer, and fit; leaves with the code of what stopped it."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    with quick_imports():
        import torch.distributed as dist
        from transformers import set_seed

        from verl_ext.collective import first_of_node_first, on_every_rank
        from verl_ext.native_output import quiet_native_stdout
        from verl_ext.trainer.distributed import build_meshes, init_process_group, settle_device
        from verl_ext.trainer.malloc import keep_freed_memory
        from verl_ext.trainer.preemption import Stop
        from verl_ext.trainer.stages import load_stage
        from verl_ext.trainer.tokenizer import load_tokenizer

        stage = load_stage(config.stage)
    startup.mark("imports")
    device_name = settle_device(config)
    if device_name == "cpu":
        keep_freed_memory()
    with quiet_native_stdout():
        init_process_group(device_name)
        meshes = build_meshes(device_name, config.ulysses_sequence_parallel_size)
    # Dropout differs between ranks, but not between those that share a sequence.
    set_seed(config.trainer.seed + dist.get_rank() // config.ulysses_sequence_parallel_size)
    startup.mark("process_group")
    tokenizer = on_every_rank(lambda: load_tokenizer(config))
    startup.mark("tokenizer")
    each_rank = first_of_node_first if stage.keeps_tokens else on_every_rank
    datasets = each_rank(lambda: stage.load_datasets(config, tokenizer, progress=dist.get_rank() == 0))
    startup.mark("data")
    trainer = stage.trainer(config, *meshes, tokenizer, *datasets, RankSignals())
    exit_code = 0
    try:
        trainer.fit()
    except Stop as stop:
        exit_code = stop.exit_code
    # torchrun ends all ranks when the first one leaves with a code; rank 0 may still be closing the trackers.
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
