"""`trainer.deterministic` selects deterministic kernels before the first one runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from verl_ext import distributed
from verl_ext.trainer import device
from verl_ext.trainer.__main__ import run_rank
from verl_ext.trainer.stages import load_config

VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC")


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    # the heap of a process that keeps freed memory grows until the process cannot fork
    monkeypatch.setattr(device, "keep_freed_memory", lambda: None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", [True, False])
def test_deterministic_mode_is_set_before_process_group_init(setting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def meet(device_name: str) -> None:
        raise ConnectionError(device_name)

    monkeypatch.setattr(distributed, "init_process_group", meet)
    config = load_config("sft", [f"trainer.deterministic={str(setting).lower()}"])
    with pytest.raises(ConnectionError, match="cpu"):
        run_rank(config)
    assert torch.are_deterministic_algorithms_enabled() is setting
    assert [os.environ[name] for name in VARIABLES] == ([":4096:8", "1"] if setting else ["", ""])
