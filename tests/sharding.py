"""Shards a model over the ranks of a test as the trainer does: FSDP2 by verl's own functions, on CPUs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from verl.utils.fsdp_utils import apply_fsdp2, fsdp2_load_full_state_dict


def sharded(model: nn.Module) -> Any:
    """The model as FSDP2 modules over all ranks, with rank 0's weights; collective."""
    mesh, state = init_device_mesh("cpu", (dist.get_world_size(),)), model.state_dict()
    apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, OmegaConf.create({"wrap_policy": {}}))
    fsdp2_load_full_state_dict(model, state, mesh, None)
    return model
