"""verl's own SFT command on CPUs: `torchrun --nproc-per-node=2 -m tests.ranks.stock_verl OVERRIDES`.

It is the released code except for what does not work on CPUs: flash-attention, NCCL and the broadcast of FSDP1 need a
GPU; bf16 is emulated and slow; and verl reduces the loss over the ranks on accelerators only.
"""

from __future__ import annotations

from contextlib import nullcontext

import verl_ext  # noqa: F401  # before verl, which it repairs

# isort: split
import torch
import verl.trainer.fsdp_sft_trainer as stock
import verl.utils.distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoModelForCausalLM


def run_on_cpus() -> None:
    """Replace what needs a GPU."""
    verl.utils.distributed.get_nccl_backend = lambda: "gloo"
    load = AutoModelForCausalLM.from_pretrained
    AutoModelForCausalLM.from_pretrained = lambda *a, **k: load(*a, **{**k, "attn_implementation": "sdpa"})
    torch.autocast = lambda *a, **k: nullcontext()
    for name in ("MixedPrecisionPolicy", "MixedPrecision"):
        make = getattr(stock, name)
        setattr(stock, name, lambda make=make, **k: make(**{**k, "param_dtype": torch.float32}))
    stock.get_init_weight_context_manager = lambda **k: nullcontext  # every rank loads the weights
    on_cpu = {"sync_module_states": False, "device_id": torch.device("cpu")}
    stock.FSDP = lambda *a, **k: FullyShardedDataParallel(*a, **{**k, **on_cpu})
    stock.is_npu_available = True  # then it sums the loss over the ranks and divides it; gloo has no mean


if __name__ == "__main__":
    run_on_cpus()
    stock.main()
