"""The dtype of the forward pass: chosen once for a run, and the same on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.trainer import loss_and_gradients, make_trainer, small_config
from verl_ext import hardware
from verl_ext.controller.vlm import default_device
from verl_ext.errors import UserError
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer import device
from verl_ext.trainer.device import has_bf16_units, resolve_device, resolve_precision
from verl_ext.trainer.stages import load_config

WITH_UNITS, WITHOUT = "flags\t\t: fpu avx512f avx512_bf16 amx_tile\n", "flags\t\t: fpu avx2\n"


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `/proc/cpuinfo` of a CPU without bf16 units."""
    path = tmp_path / "cpuinfo"
    path.write_text(WITHOUT)
    monkeypatch.setattr(hardware, "CPUINFO", path)
    return path


def settled(tmp_path: Path, command: str = "sft", setting: str = "auto") -> str:
    words = [f"trainer.default_local_dir={tmp_path / 'run'}", f"model.mixed_precision={setting}"]
    return resolve_precision(load_config(command, words), "cpu")


def record(tmp_path: Path, value: str | None) -> None:
    RunRecord(tmp_path / "run").start_attempt(first_step=0, world_size=1, total_steps=6, precision=value)


@pytest.mark.parametrize(
    ("text", "has_units"),
    [
        (WITH_UNITS, True),
        ("processor : 0\nflags : amx_bf16\n", True),
        (WITHOUT, False),
        ("Features : asimd bf16\n", True),
        ("Features : asimd\n", False),
    ],
)
def test_detects_bf16_units_in_cpu_flags(cpuinfo: Path, text: str, has_units: bool) -> None:
    cpuinfo.write_text(text)
    assert has_bf16_units() == has_units


def test_missing_cpuinfo_means_no_bf16_units(cpuinfo: Path) -> None:
    cpuinfo.unlink()
    assert not has_bf16_units()


@pytest.mark.usefixtures("one_rank")
def test_auto_uses_bf16_for_sft_on_cpus_with_bf16_units(cpuinfo: Path, tmp_path: Path) -> None:
    assert settled(tmp_path) == torch.float32
    cpuinfo.write_text(WITH_UNITS)
    assert settled(tmp_path) == torch.bfloat16
    assert settled(tmp_path, setting="fp32") == torch.float32
    assert settled(tmp_path, command="grpo") == torch.float32
    assert resolve_precision(load_config("sft", ["recipe=budget_vlm"]), "cpu") == torch.float32


@pytest.mark.parametrize(
    ("available", "name", "variable"),
    [("cuda", "GPUs", "CUDA_VISIBLE_DEVICES"), ("npu", "NPUs", "ASCEND_RT_VISIBLE_DEVICES")],
)
def test_training_on_cpus_requires_hidden_accelerators(
    available: str, name: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "get_device_name", lambda: available)
    with pytest.raises(UserError, match=f"on a machine with {name}; to train .*, hide them with {variable}=''$"):
        resolve_device(load_config("sft", ["trainer.device=cpu"]))


@pytest.mark.usefixtures("one_rank")
def test_ranks_agree_on_least_capable_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device, "gather_results", lambda function: [True, False])
    assert settled(tmp_path) == torch.float32


@pytest.mark.usefixtures("one_rank")
def test_resumed_run_keeps_precision_on_other_cpu(
    cpuinfo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path, "bf16")
    assert settled(tmp_path) == torch.bfloat16
    assert "no native bf16 support" in capsys.readouterr().err
    cpuinfo.write_text(WITH_UNITS)
    assert settled(tmp_path) == torch.bfloat16 and capsys.readouterr().err == ""
    record(tmp_path, "fp32")
    assert settled(tmp_path) == torch.float32


@pytest.mark.usefixtures("one_rank", "cpuinfo")
def test_trainer_uses_and_records_chosen_precision(quickstart: Path, tmp_path: Path) -> None:
    record(tmp_path, "bf16")
    trainer = make_trainer(small_config(quickstart, tmp_path / "run", "model.mixed_precision=auto"))
    assert trainer.token_loss.precision == torch.bfloat16
    assert trainer.config.model.mixed_precision == "auto", "the run stays the same run"
    assert {parameter.dtype for parameter in trainer.fsdp_model.parameters()} == {torch.float32}
    trainer.total_training_steps = 1
    trainer.fit()
    assert RunRecord(tmp_path / "run").read()["precision"] == "bf16"


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("keep_gathered", ["true", "false"])
def test_bf16_weights_are_computed_with_in_fp32(keep_gathered: str, quickstart: Path, tmp_path: Path) -> None:
    words = ("model.mixed_precision=fp32", f"model.fsdp_config.keep_gathered={keep_gathered}")
    stored, computed = (
        make_trainer(small_config(quickstart, tmp_path / dtype, *words, f"model.fsdp_config.model_dtype={dtype}"))
        for dtype in ("bf16", "fp32")
    )
    assert {parameter.dtype for parameter in stored.model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        for own, rounded in zip(computed.model.parameters(), stored.model.parameters()):
            own.copy_(rounded)
    micro_batch = next(iter(stored.train_dataloader)).micro_batches[0]
    assert stored.token_loss.logits(micro_batch).dtype == torch.float32
    stored.reshard_policy.reshard()
    (loss, gradients), (expected_loss, expected) = map(loss_and_gradients, (stored, computed))
    assert loss == expected_loss
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name].bfloat16()), name


@pytest.mark.parametrize(("has_bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_controller_uses_dtype_of_training_on_gpus(
    has_bf16: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bf16)
    assert default_device() == ("cuda", dtype) and resolve_precision(load_config("grpo", []), "cuda") == dtype
    assert default_device("bf16")[1] == torch.bfloat16 and default_device("fp32")[1] == torch.float32
