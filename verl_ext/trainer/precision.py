"""The number type of the forward pass: the same on every rank, and in every attempt of a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from omegaconf import DictConfig
from verl.utils.torch_dtypes import PrecisionType

from verl_ext.collective import gather_results, on_rank_zero
from verl_ext.metrics.run_record import RunRecord
from verl_ext.tell import tell
from verl_ext.trainer.hardware import pick_precision

UNITS = {"avx512_bf16", "amx_bf16"}
"""Flags of processors that multiply in bf16; others emulate it, slower than fp32."""
CPUINFO = Path("/proc/cpuinfo")


def settle_precision(config: DictConfig, device_name: str) -> str:
    """`model.mixed_precision` with auto resolved; collective.

    On CPUs auto is fp32, except in the stage sft: there a resumed run keeps what its first start chose, which is bf16
    if the processor of every rank has units for it.

    Args:
        config: the resolved configuration.
        device_name: cuda, npu or cpu.

    Returns:
        bf16 or fp32.
    """
    setting = config.model.mixed_precision
    if setting != "auto" or config.stage != "sft" or device_name != "cpu":
        return PrecisionType.to_str(pick_precision(setting, device_name))
    has_units = all(gather_results(has_bf16_units))
    recorded = on_rank_zero(lambda: RunRecord(Path(config.trainer.default_local_dir)).read()["precision"])
    if recorded is None:
        return "bf16" if has_units else "fp32"
    if recorded == "bf16" and not has_units:
        message = (
            "This run computes in bf16 since its first start, which takes longer on a processor without bf16 units."
        )
        on_rank_zero(lambda: tell(message, sys.stderr))
    return recorded


def has_bf16_units() -> bool:
    """Whether this machine's processor has one of `UNITS`."""
    found = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE) if CPUINFO.exists() else None
    return found is not None and not UNITS.isdisjoint(found[1].split())
