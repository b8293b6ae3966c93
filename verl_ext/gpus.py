"""The NVIDIA GPUs of this machine, found without torch, which imports slowly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence

DEVICES = "CUDA_VISIBLE_DEVICES"


def listed_gpus() -> list[str]:
    """Ids of all GPUs by number; empty where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"^GPU \d+: .*\(UUID: ([^)]+)\)", said, re.MULTILINE)


def visible_gpus(listed: Sequence[str] | None = None) -> list[str]:
    """Numbers or ids of those that a process started here may use, in CUDA's order.

    Args:
        listed: ids of all GPUs; None asks for them where they matter.
    """
    visible = os.environ.get(DEVICES)
    if visible is None:
        return [str(index) for index in range(len(listed_gpus() if listed is None else listed))]
    return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
