"""Builds the product's own trainer on a small configuration, for tests inside one process and under torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict

from verl_ext.data.chats import load_chats
from verl_ext.distributed import build_meshes
from verl_ext.trainer.device import resolve_device
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig, load_config
from verl_ext.trainer.tokenizer import load_tokenizer


def small_config(quickstart: Path, run_dir: Path, *overrides: str) -> SFTConfig:
    """The quickstart recipe on the test session's data, writing into `run_dir`, with no tracker."""
    config = load_config(
        "sft",
        [
            "prepare=[]",
            f"data.train_files={quickstart}/train.parquet",
            f"data.val_files={quickstart}/val.parquet",
            f"model.partial_pretrain={quickstart}/model",
            f"trainer.default_local_dir={run_dir}",
            "trainer.logger=[]",
            "data.train_batch_size=8",
            "data.micro_batch_size_per_gpu=4",
            *overrides,
        ],
    )
    assert isinstance(config, SFTConfig)
    return config


def make_trainer(config: SFTConfig) -> SFTTrainer:
    """An `SFTTrainer` on the current process group."""
    torch.manual_seed(config.trainer.seed)
    device_name = resolve_device(config)
    tokenizer = load_tokenizer(config)
    meshes = build_meshes(device_name, config.sequence_parallel_size)
    return SFTTrainer(config, *meshes, tokenizer, *load_chats(config.data, tokenizer))


def loss_and_gradients(trainer: SFTTrainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients of the first global batch, without an update; collective."""
    trainer.fsdp_model.train()
    trainer.optimizer.zero_grad()
    loss, _ = trainer.forward_backward(next(iter(trainer.train_dataloader)))
    gradients = {name: tensor.grad.full_tensor().clone() for name, tensor in trainer.fsdp_model.named_parameters()}
    return float(loss), gradients


def sharded(model: nn.Module) -> Any:
    """The model as FSDP2 modules over all ranks, with rank 0's weights; collective."""
    mesh, state = init_device_mesh("cpu", (dist.get_world_size(),)), model.state_dict()
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {"wrap_policy": {}})
    fsdp2_load_full_state_dict(model, state, mesh, None)
    return model
