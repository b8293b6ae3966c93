"""One rank of `benchmarks.plan`: the product's own trainer makes three steps, and its memory is taken down.

    torchrun ... -m benchmarks.side plan_rank CONFIG.yaml OUTPUT.json

The first step makes the optimizer's state. In the second the resident set and the clock are read. The third is recorded
by torch's profiler, whose record of the allocator gives the bytes of live tensors alone.
"""

from __future__ import annotations

import ctypes
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from verl_ext.data.batching import TokenBatch
from verl_ext.data.chats import load_chats
from verl_ext.distributed import build_meshes, init_process_group
from verl_ext.trainer.device import settle_device
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig, read_config
from verl_ext.trainer.tokenizer import load_tokenizer


def resident_bytes(name: str) -> int:
    """Of this process by /proc/self/status: VmRSS is now, VmHWM the most since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def forget_peak() -> None:
    """Have VmHWM start anew from what is resident now (proc(5), clear_refs)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def warm_up() -> None:
    """Have the kernels' and gloo's code and threads in memory before the baseline is read, and what is free given back.

    Tokenising leaves a heap that the model's tensors would fill again, which would then seem to take nothing.
    """
    torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()
    dist.all_reduce(torch.ones(1024))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def most_allocated(trainer: SFTTrainer, batch: TokenBatch) -> int:
    """Most bytes of tensors that a step holds beyond those live at its start, which no step frees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer.training_step(batch)
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    total = most = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        total += each.nbytes()
        most = max(most, total)
    return most


def state_bytes(trainer: SFTTrainer) -> int:
    """Of this rank's parameters and optimizer state."""
    state = [tensor for each in trainer.optimizer.state.values() for tensor in each.values() if torch.is_tensor(tensor)]
    tensors = [*trainer.fsdp_model.parameters(), *state]
    return sum(each.numel() * each.element_size() for each in map(local_part, tensors))


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a sharded tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def measure(config_path: str) -> dict[str, Any]:
    """The figures of this rank."""
    config = read_config(Path(config_path))
    assert isinstance(config, SFTConfig)
    device_name = settle_device(config)
    init_process_group(device_name)
    tokenizer = load_tokenizer(config)
    datasets = load_chats(config.data, tokenizer)
    warm_up()
    baseline = resident_bytes("VmRSS")
    trainer = SFTTrainer(config, *build_meshes(device_name, 1), tokenizer, *datasets)
    batches = trainer.batches()
    trainer.training_step(next(batches))
    forget_peak()
    batch, start = next(batches), time.perf_counter()
    trainer.training_step(batch)
    seconds, most_resident = time.perf_counter() - start, resident_bytes("VmHWM")
    return {
        "resident_bytes": most_resident - baseline,
        "tensor_bytes": state_bytes(trainer) + most_allocated(trainer, next(batches)),
        "step_s": seconds,
        "micro_batches": [list(each["input_ids"].shape) for each in batch.micro_batches],
        "loss_tokens": batch.num_loss_tokens,
    }


def main(words: list[str]) -> None:
    """Measure, and have rank 0 write what every rank found."""
    found = measure(words[0])
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        Path(words[1]).write_text(json.dumps(everyone))
    dist.destroy_process_group()
