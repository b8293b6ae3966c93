"""Drive `SFTTrainer` the way verl's `run_sft` drives its `FSDPSFTTrainer`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import verl.trainer
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer, create_sft_dataset
from verl.utils import hf_tokenizer

from verl_ext.data.batching import pad
from verl_ext.distributed import build_meshes
from verl_ext.errors import UserError
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig

pytestmark = pytest.mark.usefixtures("one_rank")


def verls_config(quickstart: Path, run_dir: Path, *overrides: str) -> DictConfig:
    """verl's own configuration, composed as its command does, on the quickstart's data and model."""
    words = [
        f"data.train_files={quickstart}/train.parquet",
        f"data.val_files={quickstart}/val.parquet",
        "data.multiturn.enable=true",
        "data.train_batch_size=8",
        "data.max_length=256",
        "data.train_max_samples=32",
        "data.val_max_samples=8",
        f"model.partial_pretrain={quickstart}/model",
        "optim.lr=1e-3",
        f"trainer.default_local_dir={run_dir}",
        "trainer.total_training_steps=2",
        "trainer.logger=[]",
        "trainer.device=cpu",
    ]
    with initialize_config_dir(str(Path(verl.trainer.__path__[0]) / "config"), version_base=None):
        return compose("sft_trainer", [*words, *overrides])


def driven_by_verl(config: DictConfig) -> SFTTrainer:
    """The trainer with verl's tokenizer, datasets and constructor arguments."""
    device_mesh, ulysses_device_mesh = build_meshes("cpu", config.ulysses_sequence_parallel_size)
    tokenizer = hf_tokenizer(config.model.partial_pretrain)
    data = config.data
    return SFTTrainer(
        config=config,
        device_mesh=device_mesh,
        ulysses_device_mesh=ulysses_device_mesh,
        tokenizer=tokenizer,
        train_dataset=create_sft_dataset(data.train_files, data, tokenizer, max_samples=data.train_max_samples),
        val_dataset=create_sft_dataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples),
    )


def test_trainer_driven_by_verl_trains_saves_and_resumes(quickstart: Path, tmp_path: Path) -> None:
    trainer = driven_by_verl(verls_config(quickstart, tmp_path))
    assert isinstance(trainer, FSDPSFTTrainer) and isinstance(trainer.config, SFTConfig)
    trainer.fit()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert sorted(losses) == [1, 2] and all(0 < loss < 20 for loss in losses.values())
    assert any("train/grad_norm" in row for row in rows), "verl drops it"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "2"
    resumed = driven_by_verl(verls_config(quickstart, tmp_path, "trainer.total_training_steps=3"))
    assert resumed.load_checkpoint() == resumed.global_step == 2


def test_validation_step_returns_mean_loss_of_verl_batch(quickstart: Path, tmp_path: Path) -> None:
    trainer = driven_by_verl(verls_config(quickstart, tmp_path, "+model.mixed_precision=fp32"))
    data = verls_config(quickstart, tmp_path).data
    dataset = create_sft_dataset(data.val_files, data, trainer.tokenizer, max_samples=8)
    batch = {name: torch.stack([dataset[row][name] for row in range(4)]) for name in dataset[0]}
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
    mask = batch["loss_mask"][:, 1:].flatten().bool()
    expected = losses[mask].mean().item()
    assert trainer.validation_step(batch).item() == pytest.approx(expected, rel=1e-5)
    ours = pad([trainer.val_dataset[row] for row in range(4)], trainer.tokenizer.pad_token_id)
    assert trainer.validation_step(ours).item() == pytest.approx(expected, rel=1e-5), "padding changes nothing"


def test_invalid_value_of_verl_key_is_rejected(quickstart: Path, tmp_path: Path) -> None:
    config = verls_config(quickstart, tmp_path)
    config.trainer.save_freq = "often"
    with pytest.raises(UserError, match="trainer.save_freq"):
        driven_by_verl(config)
