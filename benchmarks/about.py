"""What a result file says of where and when it was made."""

from __future__ import annotations

import os
import platform
from collections import Counter
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from verl_ext.processes import cpu_name


def about(*packages: str) -> dict[str, Any]:
    """Date, machine, and versions of Python and of some packages.

    Args:
        packages: whose versions matter.
    """
    versions = {"python": platform.python_version(), **{package: version(package) for package in packages}}
    return {"date": date.today().isoformat(), "machine": machine(), "versions": versions}


def machine() -> str:
    """The processors, their memory and the kernel; the GPUs where there are any."""
    gib = psutil.virtual_memory().total / 2**30
    kernel = f"{platform.system()} {platform.release()}"
    processor = f"{cpu_name()} {platform.machine()}".strip()
    return ", ".join([f"{os.cpu_count()} x {processor}", f"{gib:.0f} GiB", kernel, *gpus()])


def gpus() -> list[str]:
    """How many of which GPUs, without importing torch where there are none."""
    lines = [
        line
        for path in Path("/proc/driver/nvidia/gpus").glob("*/information")
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return [f"{count} x {line.partition(':')[2].strip()}" for line, count in Counter(lines).items()]
