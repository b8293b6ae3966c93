"""Devices, process groups and meshes."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from verl.utils.device import get_device_name

from verl_ext.errors import UserError

# Long enough for one rank to write a large export to a slow disk while the others wait at the barrier.
COLLECTIVE_TIMEOUT = timedelta(hours=2)


def settle_device(config: DictConfig) -> str:
    """Replace `trainer.device=auto` by the accelerator that is there, and return it.

    Raises:
        UserError: the configuration asks for an accelerator that is not there.
    """
    available = get_device_name()
    wanted = config.trainer.device
    if wanted not in ("auto", "cpu", available):
        raise UserError(f"trainer.device is {wanted}, but this machine has {available}; set trainer.device=auto")
    if wanted == "cpu" and available != "cpu":
        raise UserError(
            f"trainer.device is cpu on a machine with {available}; hide that instead, with CUDA_VISIBLE_DEVICES=''"
        )
    config.trainer.device = available
    return available


def init_process_group(device_name: str) -> None:
    """Join the ranks that torchrun started; gloo for CPU tensors, NCCL or HCCL for the accelerator's."""
    backends = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "npu": "cpu:gloo,npu:hccl"}
    if device_name != "cpu":
        getattr(torch, device_name).set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backends[device_name], timeout=COLLECTIVE_TIMEOUT)


def build_meshes(device_name: str, sequence_parallel_size: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh over all ranks that FSDP2 shards on, and the (dp, sp) mesh of Ulysses."""
    world_size = dist.get_world_size()
    flat = init_device_mesh(device_name, (world_size,), mesh_dim_names=("fsdp",))
    shape = (world_size // sequence_parallel_size, sequence_parallel_size)
    return flat, init_device_mesh(device_name, shape, mesh_dim_names=("dp", "sp"))
