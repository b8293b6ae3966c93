"""What this machine has: CPU, visible GPUs, and the memory that its cgroups leave. Imports torch only when needed."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

DEVICES = "CUDA_VISIBLE_DEVICES"
"""The variable that limits CUDA to some GPUs."""
DEVICE_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""The variable with which CUDA numbers GPUs as nvidia-smi does; by default it numbers the fastest first."""
CPUINFO = Path("/proc/cpuinfo")
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
"""Has a directory for each GPU, named by its PCI address."""
DEVICE_FILES = Path("/dev")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Flags of CPUs with bf16 units, on x86 and on Arm; others emulate bf16, which is slower than fp32."""


def cpu_name() -> str:
    """The CPU's model name; empty if unknown."""
    return _from_cpuinfo("model name")


def cpu_flags() -> set[str]:
    """The CPU's instruction set extensions, with Linux's names; empty if unknown."""
    return set(_from_cpuinfo("flags|Features").split())  # on x86 and on Arm


def has_bf16_units() -> bool:
    """Whether the CPU has instructions for bf16."""
    return not BF16_FLAGS.isdisjoint(cpu_flags())


def gpu_has_bf16() -> bool:
    """Whether this process's current GPU computes in bf16, as from Ampere on; False without one. Initializes CUDA."""
    import torch

    return torch.cuda.is_bf16_supported(including_emulation=False)


def pick_precision(setting: str, device: str) -> torch.dtype:
    """Resolve a setting of bf16, fp32 or auto, which is bf16 on accelerators that support it, else fp32.

    Args:
        device: cuda, npu or cpu.
    """
    import torch

    if setting == "auto":
        setting = "bf16" if device == "npu" or (device == "cuda" and gpu_has_bf16()) else "fp32"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[setting]


def disable_cudnn_attention() -> None:
    """Keep torch from cuDNN's attention, its choice on Hopper, which plans each new length for 40 ms or more."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(False)


def _from_cpuinfo(field: str) -> str:
    try:
        found = re.search(rf"^(?:{field})\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return ""
    return "" if found is None else found[1].strip()


def listed_gpus() -> list[str]:
    """UUIDs of all NVIDIA GPUs of this machine, by nvidia-smi's index."""
    if shutil.which("nvidia-smi") is None:  # a container may lack it; it sorts by PCI address
        texts = [path.read_text() for path in sorted(DRIVER_GPUS.glob("*/information"))]
        found = [re.search(r"^GPU UUID:\s*(GPU-\S+)(?s:.*)^Device Minor:\s*([0-9]+)", text, re.M) for text in texts]
        # the driver shows a container all GPUs of the machine
        return [gpu[1] for gpu in found if gpu is not None and (DEVICE_FILES / f"nvidia{gpu[2]}").exists()]
    output = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"^GPU \d+: .*\(UUID: ([^)]+)\)", output, re.MULTILINE)


def visible_gpus(listed: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> list[str]:
    """Indices or full ids of the GPUs that child processes can use, in the order of `DEVICES`, otherwise of nvidia-smi.

    Args:
        listed: output of `listed_gpus`; None calls it if needed.
        environment: variables of the processes; None: those of this process.
    """
    visible = (os.environ if environment is None else environment).get(DEVICES)
    if listed is None and (visible is None or "GPU-" in visible):
        listed = listed_gpus()
    if visible is None:
        return [str(index) for index in range(len(listed or ()))]
    names = (name.strip() for name in visible.split(","))
    valid = takewhile(lambda name: name not in ("", "-1"), names)  # as CUDA, ignores what follows an invalid one
    return [name if name.isdecimal() else gpu_id(name, listed or ()) for name in valid]


def gpu_id(name: str, listed: Sequence[str]) -> str:
    """The full id of a GPU given by its index or by a prefix of its id, which CUDA accepts and vLLM does not.

    Args:
        name: returned unchanged if it does not identify one GPU of `listed`.
        listed: output of `listed_gpus`.
    """
    if name.isdecimal():
        return listed[int(name)] if int(name) < len(listed) else name
    found = [full for full in listed if full.startswith(name)]
    return found[0] if len(found) == 1 else name


# Memory

_CGROUP_FILES = {
    "unified": ("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""Limit, usage, and the names of the page cache in `memory.stat`, in version 2 and in the controller of version 1."""


class Memory(NamedTuple):
    """Bytes of memory; infinite for cgroups without a limit."""

    total: float
    available: float


def process_memory() -> Memory:
    """The memory that this machine and the cgroups of this process can provide to it."""
    import psutil  # not installed yet when install.py uses this module

    membership = Path("/proc/self/cgroup")  # missing in a kernel without cgroups
    limits = cgroup_memory(membership.read_text() if membership.exists() else "", Path("/sys/fs/cgroup"))
    machine = psutil.virtual_memory()
    return Memory(min(machine.total, limits.total), min(machine.available, limits.available))


def cgroup_memory(membership: str, root: Path) -> Memory:
    """The smallest memory limit of a process's cgroups, and the least that they leave.

    Page cache does not count as used, because the kernel drops it before it refuses memory.

    Args:
        membership: content of the process's `/proc/PID/cgroup`.
        root: the mounted hierarchy, `/sys/fs/cgroup`.
    """
    least = Memory(math.inf, math.inf)
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        group = base / path.lstrip("/")
        # a container may see only its own group, at the base, but the path from the host
        for each in (group, *group.parents[: len(group.parts) - len(base.parts)]):
            found = _memory_of_group(each, "memory" if controllers else "unified")
            least = Memory(min(least.total, found.total), min(least.available, found.available))
    return least


def _memory_of_group(group: Path, kind: str) -> Memory:
    limit_file, usage_file, cache_names = _CGROUP_FILES[kind]
    try:
        limit = (group / limit_file).read_text().strip()
        usage = int((group / usage_file).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root of the hierarchy has no limit
        limit = "max"
    if limit == "max":
        return Memory(math.inf, math.inf)
    return Memory(int(limit), max(int(limit) - usage + sum(int(counts.get(name, 0)) for name in cache_names), 0))
