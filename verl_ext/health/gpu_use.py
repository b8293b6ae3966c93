"""How busy the GPUs of this machine are, by NVML."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

SAMPLES = 10
PAUSE_S = 0.2


def gpu_use() -> list[float]:
    """Share of the time that each GPU with a process on it computes, over two seconds.

    Empty where there is none, no NVML, or a GPU that does not tell, such as one that is split (MIG).
    """
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return _measured(pynvml)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return []


def _measured(nvml: Any) -> list[float]:
    every = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
    used = [handle for handle in every if nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    sums = [0.0] * len(used)
    for _ in range(SAMPLES):
        time.sleep(PAUSE_S)
        for place, handle in enumerate(used):
            sums[place] += nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    return [total / SAMPLES for total in sums]
