"""The dtype that vLLM computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from verl_ext.grpo.vllm_engine import pick_rollout_dtype
from verl_ext.vllm_setup import pick_vllm_dtype


def set_gpu(monkeypatch: pytest.MonkeyPatch, *, has_bf16: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16 or including_emulation)


@pytest.mark.parametrize("flags, quick", [("fpu avx512_bf16 sse", "bfloat16"), ("fpu sse", "float32")])
def test_auto_is_bfloat16_where_hardware_supports_it(flags: str, quick: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {flags}\n")
    set_gpu(monkeypatch, has_bf16=True)
    for stored in (torch.bfloat16, torch.float16, None):
        assert pick_vllm_dtype("auto", False, stored) == quick
        assert pick_vllm_dtype("auto", True, stored) == "bfloat16"


def test_auto_keeps_float32_weights_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, has_bf16=True)
    assert pick_vllm_dtype("auto", False, torch.float32) == pick_rollout_dtype("auto", False) == "float32"
    assert pick_vllm_dtype("auto", True, torch.float32) == pick_rollout_dtype("auto", True) == "bfloat16"


def test_auto_leaves_choice_to_vllm_on_gpus_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    set_gpu(monkeypatch, has_bf16=False)
    for stored in (torch.bfloat16, torch.float32):
        assert pick_vllm_dtype("auto", True, stored) == "auto"
    assert pick_rollout_dtype("auto", True) == "auto"


@pytest.mark.parametrize("wanted", ["float16", "bfloat16", "float32"])
def test_explicit_dtype_is_used(wanted: str) -> None:
    assert pick_vllm_dtype(wanted, False, torch.float32) == pick_vllm_dtype(wanted, True, torch.bfloat16) == wanted
