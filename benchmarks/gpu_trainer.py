"""Builds the project's trainers in the process of a part of `benchmarks.gpu_check`."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from verl.utils.device import get_device_name

from benchmarks.gpu_check import GPUCheckSettings
from verl_ext.distributed import build_meshes, init_process_group, to_full
from verl_ext.trainer.device import prepare_device
from verl_ext.trainer.stages import STAGES, RunConfig, SFTConfig, load_config
from verl_ext.trainer.tokenizer import load_tokenizer
from verl_ext.trainer.trainer import PipelineTrainer

Trainer = TypeVar("Trainer", bound=PipelineTrainer)


def build_trainer(config: RunConfig, kind: type[Trainer]) -> Trainer:
    """Build the trainer of the configuration's stage, on the ranks of torchrun or in this process alone.

    Args:
        config: configuration of the run.
        kind: class of the trainer.
    """
    device_name = prepare_device(config)
    join_ranks()
    stage = STAGES[config.stage]
    torch.manual_seed(config.trainer.seed)
    tokenizer = load_tokenizer(config)
    datasets = stage.load_datasets(config, tokenizer, progress=False)
    trainer = stage.trainer_class()(config, *build_meshes(device_name, 1), tokenizer, *datasets)
    assert isinstance(trainer, kind)
    return trainer


def join_ranks() -> None:
    """Join the ranks of torchrun, or be the only rank; once per process."""
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    init_process_group(get_device_name())


def free_port() -> int:
    """A port that is currently free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def parameters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters by name, resharded: after a forward pass without a backward pass, the root's are gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return dict(model.named_parameters())


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor, detached, on the CPU; collective."""
    return to_full(tensor).detach().cpu()


def sft_config(settings: GPUCheckSettings, model: Path, *overrides: str) -> SFTConfig:
    """The quickstart's recipe with another model, without exports and loggers."""
    config = load_config("sft", sft_words(settings, model, Path(settings.scratch) / "run", *overrides))
    assert isinstance(config, SFTConfig)
    return config


def sft_words(settings: GPUCheckSettings, model: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of `run_sft.sh` after the number of ranks; if a key is repeated, its last value counts."""
    data = Path(settings.scratch) / "quickstart"
    values = {
        "recipe": "quickstart",
        "prepare": "[]",
        "data.train_files": data / "train.parquet",
        "data.val_files": "null",
        "data.token_cache": Path(settings.scratch) / "tokens",
        "data.train_batch_size": 16,
        "model.partial_pretrain": model,
        "model.mixed_precision": "auto",
        "trainer.default_local_dir": run_dir,
        "trainer.total_epochs": 1000,
        "trainer.checkpoint.save_contents": "[model,optimizer,extra]",
        "trainer.logger": "[]",
    }
    values |= {key: value for key, _, value in (word.partition("=") for word in overrides)}
    return [f"{key}={value}" for key, value in values.items()]
