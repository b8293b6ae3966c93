"""What the machines can do, from their data sheets, with the shares of it that training gets, which are assumptions."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from verl_ext.errors import UserError


@dataclass(frozen=True)
class Hardware:
    """One kind of GPU, or of processor core, with its links.

    Attributes:
        name: as in `hardware=`.
        source: where the numbers are from.
        memory_bytes: of one GPU. Data sheets count 80 GB as 80e9; a card shows some 6 % more, which is left for what no
            formula here has: the CUDA context, NCCL's own buffers, workspaces and the allocator's fragments.
        flops: dense matrix products in a second, in the type of the forward pass.
        memory_bandwidth: bytes in a second from and to its memory.
        link: bytes in a second that it sends to others of its node, and receives at the same time.
        network: the same to other nodes, its share of the node's adapters.
        compute_share: of `flops` that a training step's matrix products and all between them reach.
        link_share: of `link` and `network` that a large collective reaches.
        latency: seconds that a collective takes for each rank that its ring passes.
        is_gpu: whether NCCL, bf16 and optimizers over lists of tensors are used.
    """

    name: str
    source: str
    memory_bytes: float
    flops: float
    memory_bandwidth: float
    link: float
    network: float
    compute_share: float
    link_share: float
    latency: float
    is_gpu: bool = True


_LINK_SHARE = 0.78  # 350 of 450 GB/s in an all-gather on H100: github.com/NVIDIA/nccl/issues/1281
_LATENCY = 3e-6
HARDWARE = {
    each.name: each
    for each in (
        Hardware(
            "h100",
            "NVIDIA H100 SXM data sheet; network: DGX H100, one 400 Gb/s adapter a GPU",
            80e9, 989e12, 3.35e12, 450e9, 50e9, 0.40, _LINK_SHARE, _LATENCY,
        ),
        Hardware(
            "h200",
            "NVIDIA H200 SXM data sheet; network: DGX H200, one 400 Gb/s adapter a GPU",
            141e9, 989e12, 4.8e12, 450e9, 50e9, 0.40, _LINK_SHARE, _LATENCY,
        ),
        Hardware(
            "a100",
            "NVIDIA A100 SXM 80GB data sheet; network: DGX A100, one 200 Gb/s adapter a GPU",
            80e9, 312e12, 2.039e12, 300e9, 25e9, 0.50, _LINK_SHARE, _LATENCY,
        ),
        Hardware(
            "cpu",
            "one core of an Intel Xeon with AVX-512 at 2.3 GHz (64 fp32 operations a cycle), 12 GiB of memory a core; "
            "bandwidths are assumptions",
            12 * 2**30, 147e9, 10e9, 1.5e9, 1e9, 0.60, 1.0, 1e-4, is_gpu=False,
        ),
    )
}  # fmt: skip
"""By name. The compute shares: 33 to 39 % of the model's own operations on H100 (torchtitan, benchmarks/
llama3_h100_202412_torchtitan.md, recomputed operations not counted, which are counted here) and 57 % on A100
(torchtitan, docs/performance.md, with torch.compile)."""


def find_hardware(name: str) -> Hardware:
    """The hardware of this name.

    Raises:
        UserError: there is none; the message lists those there are.
    """
    if name not in HARDWARE:
        near = difflib.get_close_matches(name, HARDWARE, n=1)
        hint = f"did you mean hardware={near[0]}?" if near else f"take one of {', '.join(HARDWARE)}"
        raise UserError(f"there is no hardware '{name}'; {hint}")
    return HARDWARE[name]
