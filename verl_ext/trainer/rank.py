"""One rank from its configuration to its exit code."""

from __future__ import annotations

import torch.distributed as dist
from transformers import set_seed

from verl_ext.distributed import build_meshes, init_process_group, local_rank_zero_first, on_every_rank
from verl_ext.errors import Stop
from verl_ext.metrics.timing import startup
from verl_ext.processes import quiet_stdout
from verl_ext.trainer.hardware import prepare_device
from verl_ext.trainer.loop import PipelineTrainer
from verl_ext.trainer.stages import STAGES, RunConfig
from verl_ext.trainer.stop_signals import RankSignals
from verl_ext.trainer.tokenizer import load_tokenizer


def run_rank(config: RunConfig) -> int:
    """Build the ranks, the data and the trainer, and fit.

    Args:
        config: the resolved configuration.

    Returns:
        The code of what stopped it; 0 where all steps are done.

    Raises:
        UserError: the input cannot be used.
    """
    trainer = build_trainer(config)
    exit_code = 0
    try:
        trainer.fit()
    except Stop as stop:
        exit_code = stop.exit_code
    # torchrun ends all ranks when the first one leaves with a code; rank 0 may still be closing the trackers.
    dist.barrier()
    dist.destroy_process_group()
    return exit_code


def build_trainer(config: RunConfig) -> PipelineTrainer:
    """The stage's trainer, on a process group that is created here."""
    stage, device_name = STAGES[config.stage], prepare_device(config)
    with quiet_stdout():
        init_process_group(device_name)
        meshes = build_meshes(device_name, config.sequence_parallel_size)
    # Dropout differs between ranks, but not between those that share a sequence.
    set_seed(config.trainer.seed + dist.get_rank() // config.sequence_parallel_size)
    startup.mark("process_group")
    tokenizer = on_every_rank(lambda: load_tokenizer(config))
    startup.mark("tokenizer")
    each_rank = local_rank_zero_first if stage.keeps_tokens else on_every_rank
    datasets = each_rank(lambda: stage.load_datasets(config, tokenizer, progress=dist.get_rank() == 0))
    startup.mark("data")
    trainer: PipelineTrainer = stage.trainer_class()(config, *meshes, tokenizer, *datasets, RankSignals())
    return trainer
