"""How busy the GPUs of this machine are, by NVML."""

from __future__ import annotations

import importlib.util
import time

SAMPLES = 10
PAUSE_S = 0.2


def gpu_use() -> list[float]:
    """Share of the time that each GPU computes, over two seconds; empty where there is none, or no NVML."""
    if importlib.util.find_spec("pynvml") is None:
        return []
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        sums = [0.0] * len(handles)
        for _ in range(SAMPLES):
            time.sleep(PAUSE_S)
            for place, handle in enumerate(handles):
                sums[place] += pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        return [total / SAMPLES for total in sums]
    finally:
        pynvml.nvmlShutdown()
