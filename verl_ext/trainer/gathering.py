"""Whether weights stay gathered, and gradients whole, between the micro-batches of a step."""

from __future__ import annotations

import os
from typing import cast

import psutil
import torch
from torch.distributed.fsdp import FSDPModule

from verl_ext.trainer.config import GATHERED_SHARE

BYTES_OF_GRADIENT = 4


class Gathering:
    """Has FSDP2 gather the weights once a step and reduce the gradients once, where memory allows.

    Otherwise each micro-batch gathers every block twice and reduces its gradients.

    Args:
        model: sharded with FSDP2.
        keeps: whether weights and gradients stay whole between micro-batches.
    """

    def __init__(self, model: FSDPModule, keeps: bool) -> None:
        self._model, self.keeps = model, keeps
        model.set_reshard_after_forward(not keeps)

    def begin(self, is_last: bool) -> None:
        """Before a micro-batch: what happens to weights and gradients behind its forward and backward pass.

        What was gathered by forward passes alone stays so until the backward pass of a last one, or `release`.
        """
        if self.keeps:
            self._model.set_reshard_after_forward(False)  # drawing by the model itself ends with true
            self._model.set_requires_gradient_sync(is_last)
            self._model.set_reshard_after_backward(is_last)

    def release(self) -> None:
        """Shard again what forward passes without a backward pass have left gathered."""
        for module in cast("torch.nn.Module", self._model).modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def keeps_gathered(setting: bool | str, model: torch.nn.Module, precision: torch.dtype, device_name: str) -> bool:
    """`model.fsdp_config.keep_gathered` with auto resolved: where it takes a small part of the memory.

    Args:
        setting: true, false or auto.
        model: before or after it is sharded.
        precision: of the forward pass, and so of gathered weights.
        device_name: cuda, npu or cpu.
    """
    if setting != "auto":
        return bool(setting)
    weights = sum(parameter.numel() for parameter in model.parameters()) * precision.itemsize
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return weights + trained * BYTES_OF_GRADIENT <= GATHERED_SHARE * _memory_of_rank(device_name)


def _memory_of_rank(device_name: str) -> float:
    """Bytes that this rank may use, the same on all ranks of like machines."""
    if device_name == "cpu":
        return psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return float(getattr(torch, device_name).get_device_properties(0).total_memory)
