"""Resuming with another model is rejected, even if its tensors have the same names and shapes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.errors import UserError
from verl_ext.trainer.grpo import GRPOTrainer, RewardTrainer
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig

pytestmark = pytest.mark.usefixtures("one_rank")


def save(quickstart: Path, run_dir: Path, *overrides: str) -> SFTTrainer:
    """Train one step and save a checkpoint."""
    trainer = make_trainer(small_config(quickstart, run_dir, *overrides))
    trainer.training_step(next(trainer.batches()))
    trainer.train_sampler.advance()
    trainer.save_checkpoint(1)
    trainer.checkpoint_manager.wait()
    return trainer


def test_rejects_another_scaling_of_adapters(quickstart: Path, tmp_path: Path) -> None:
    words = ("model.lora_rank=4", "model.lora_alpha=16")
    save(quickstart, tmp_path, *words)
    assert make_trainer(small_config(quickstart, tmp_path, *words)).global_step == 1
    with pytest.raises(UserError, match=r"its LoRA scaling .* is 4\.0, this run's is 8\.0; restore the model's"):
        make_trainer(small_config(quickstart, tmp_path, "model.lora_rank=4", "model.lora_alpha=32"))


def test_rejects_weights_of_precision_that_loses_values(quickstart: Path, tmp_path: Path) -> None:
    save(quickstart, tmp_path / "fp32")
    with pytest.raises(UserError, match=r"in torch\.float32, but .* torch\.bfloat16.*; restore model\.fsdp_config"):
        make_trainer(small_config(quickstart, tmp_path / "fp32", "model.fsdp_config.model_dtype=bf16"))
    save(quickstart, tmp_path / "bf16", "model.fsdp_config.model_dtype=bf16")
    assert make_trainer(small_config(quickstart, tmp_path / "bf16")).global_step == 1


def test_rejects_another_architecture(quickstart: Path, tmp_path: Path) -> None:
    """With as many heads of half the size, all tensors keep their shapes."""
    save(quickstart, tmp_path / "run")
    other = Path(shutil.copytree(quickstart / "model", tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    num_heads, size = (
        config["num_attention_heads"],
        config.get("head_dim") or (config["hidden_size"] // config["num_attention_heads"]),
    )
    changes = {"num_attention_heads": 2 * num_heads, "head_dim": size // 2}
    changes["num_key_value_heads"] = 2 * config["num_key_value_heads"]
    (other / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=f"its num_attention_heads is {num_heads}, this run's is {2 * num_heads}; rest"):
        make_trainer(small_config(quickstart, tmp_path / "run", f"model.partial_pretrain={other}"))


def test_rejects_another_reference_model(quickstart: Path, tmp_path: Path) -> None:
    """A copy elsewhere is the same model; the same path may hold another one."""
    model = Path(shutil.copytree(quickstart / "model", tmp_path / "model"))

    def trainer(saved: str) -> Any:
        keys = {"partial_pretrain": str(model), "lora_adapter_path": None, "use_shm": False}
        settings = SimpleNamespace(model=SimpleNamespace(**keys))
        return SimpleNamespace(config=settings, saved_reference_digest=saved, reference_digest="")

    first = trainer("")
    GRPOTrainer.require_same_reference(first)
    model = Path(shutil.copytree(model, tmp_path / "moved"))
    GRPOTrainer.require_same_reference(trainer(first.reference_digest))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match="moved differs from the reference model .* so far; restore the original"):
        GRPOTrainer.require_same_reference(trainer(first.reference_digest))


def test_rejects_other_adapters_of_reference_model(quickstart: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "adapter_config.json").write_text("{}")
    (adapters / "adapter_model.safetensors").write_text("first")
    keys = {"partial_pretrain": str(quickstart / "model"), "lora_adapter_path": str(adapters), "use_shm": False}

    def trainer(**saved: str) -> Any:
        trainer = GRPOTrainer.__new__(GRPOTrainer)
        trainer.config = SimpleNamespace(model=SimpleNamespace(**keys))
        for name, digest in saved.items():
            setattr(trainer, f"saved_{name}", digest)
        return trainer

    first = trainer()
    first.require_same_reference()
    saved = {name: getattr(first, name) for name in ("reference_digest", "reference_adapter_digest")}
    trainer(**saved).require_same_reference()
    (adapters / "adapter_model.safetensors").write_text("other")
    with pytest.raises(UserError, match="lora_adapter_path=.*/adapters differs from the reference model"):
        trainer(**saved).require_same_reference()
    trainer(reference_digest=saved["reference_digest"]).require_same_reference()  # saved by an earlier version


def test_checkpoint_of_sft_has_no_reference_model(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    monkeypatch.setattr(RewardTrainer, "load_data_state", lambda self, state: None)
    trainer.load_data_state({})
    assert trainer.saved_reference_digest == ""


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (2, 2)])
def test_changed_number_of_updates_keeps_place_in_schedule(
    before: int, after: int, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place counts updates, of which a step of GRPO may have several."""

    def trainer_with(num_updates: int, name: str) -> SFTTrainer:
        monkeypatch.setattr(SFTConfig, "updates_per_step", num_updates)
        return make_trainer(small_config(quickstart, tmp_path / name))

    saved, undisturbed = trainer_with(before, "run"), trainer_with(after, "other")
    for trainer, num_updates in ((saved, before), (undisturbed, after)):
        for _ in range(num_updates):
            trainer.lr_scheduler.step()
    saved.train_sampler.advance()
    saved.save_checkpoint(1)
    saved.checkpoint_manager.wait()
    resumed = trainer_with(after, "run")
    assert resumed.lr_scheduler.last_epoch == after
    assert resumed.lr_scheduler.get_last_lr() == undisturbed.lr_scheduler.get_last_lr() != [0.0]
