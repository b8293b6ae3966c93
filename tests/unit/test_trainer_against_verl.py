"""Known issues of verl 0.7.0's trainer, shown on the stock class and compared with ours on the same model and data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.trainer.fsdp_sft_trainer import FSDPSFTTrainer

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.config.schema import as_dict
from verl_ext.data.batching import MicroBatchPlan, Prefetcher, TokenBatch, pad
from verl_ext.errors import UserError
from verl_ext.trainer.device import pick_attention
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.trainer import NonFiniteGuard

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def ours(quickstart: Path, tmp_path: Path) -> SFTTrainer:
    return make_trainer(small_config(quickstart, tmp_path, "optim.lr_scheduler=constant", "optim.lr_warmup_steps=100"))


@pytest.fixture
def stock(ours: SFTTrainer, quickstart: Path) -> FSDPSFTTrainer:
    """verl's class with a model it can run on a CPU; its constructor requires flash-attention."""
    trainer = object.__new__(FSDPSFTTrainer)
    trainer.config = OmegaConf.create(as_dict(ours.config))
    trainer.device_name, trainer.use_remove_padding = "cpu", False
    trainer.device_mesh, trainer.ulysses_device_mesh = ours.device_mesh, ours.ulysses_device_mesh
    trainer.model = trainer.fsdp_model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=1e-3)
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: step / 100)
    return trainer


def stock_batch(ours: SFTTrainer) -> object:
    from tensordict import TensorDict

    samples = [ours.train_dataset[index] for index in range(8)]
    for number, sample in enumerate(samples):  # very unequal numbers of loss tokens
        sample["loss_mask"][: len(sample["loss_mask"]) - 1 - 3 * number] = 0
    return TensorDict(pad(samples, 0), batch_size=8)


def first_batch(trainer: SFTTrainer) -> TokenBatch:
    batch = next(trainer.batches())
    return batch


def test_gradient_norm_is_logged(ours: SFTTrainer, stock: FSDPSFTTrainer) -> None:
    assert "train/grad_norm" not in stock.training_step(stock_batch(ours))
    metrics = ours.training_step(first_batch(ours))
    assert 0 < metrics["train/grad_norm"] < 100
    assert metrics["train/perplexity"] == pytest.approx(torch.tensor(metrics["train/loss"]).exp().item(), rel=1e-5)


def poison(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))


def test_skipped_update_does_not_advance_learning_rate(ours: SFTTrainer, stock: FSDPSFTTrainer) -> None:
    poison(stock.model)
    stock.training_step(stock_batch(ours))
    assert stock.lr_scheduler.last_epoch == 1  # the optimizer was skipped, the schedule was not
    poison(ours.fsdp_model)
    before = ours.fsdp_model.lm_head.weight.full_tensor().clone()
    metrics = ours.training_step(first_batch(ours))
    assert ours.lr_scheduler.last_epoch == 0
    assert metrics["train/skipped_steps"] == 1
    assert torch.equal(before, ours.fsdp_model.lm_head.weight.full_tensor())


@pytest.mark.filterwarnings("error:Detected call of")
def test_step_without_loss_tokens_only_advances_schedule(ours: SFTTrainer) -> None:
    """AdamW would move the weights by momentum and weight decay, and the loss curve would have a 0."""
    whole = first_batch(ours)
    empty = TokenBatch([{**each, "loss_mask": each["loss_mask"] * 0} for each in whole.micro_batches], whole.rows)
    for number, batch in enumerate([empty, whole, whole, empty], start=1):
        before = ours.fsdp_model.lm_head.weight.full_tensor().clone()
        metrics = ours.training_step(batch)
        is_same = torch.equal(before, ours.fsdp_model.lm_head.weight.full_tensor())
        assert ours.lr_scheduler.last_epoch == number
    assert is_same and metrics["train/num_loss_tokens"] == metrics["train/skipped_steps"] == 0
    assert not metrics.keys() & {"train/loss", "train/grad_norm", "train/perplexity"}


def test_three_non_finite_losses_stop_run(ours: SFTTrainer) -> None:
    poison(ours.fsdp_model)
    with pytest.raises(UserError, match=r"3 steps in a row, the last at step 3; .*train.parquet rows \d+, \d+") as stop:
        ours.fit()
    assert stop.value.args[0].count("train.parquet") == 1
    run = json.loads((ours.run_dir / "run.json").read_text())
    assert (run["status"], run["attempts"][0]["last_step"]) == ("failed", 3)
    rows = [json.loads(line) for line in (ours.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/loss"] for row in rows if "train/loss" in row] == ["NaN"] * 3


def test_step_with_several_skipped_updates_counts_once() -> None:
    guard = NonFiniteGuard(2, str)
    for step, updates in enumerate([[False] * 4, [False, True, False], [False] * 4], start=1):
        for is_finite in updates:
            guard.count(is_finite)
        guard.check(step, [], 0)
    guard.check(4, [], 0)  # without loss tokens, no update was attempted
    guard.count(False)
    with pytest.raises(UserError, match="2 steps in a row, the last at step 5"):
        guard.check(5, [], 0)
    assert guard.num_skipped == 11


def test_verls_loss_depends_on_the_micro_batch_size(ours: SFTTrainer, stock: FSDPSFTTrainer) -> None:
    losses = []
    for size in (1, 8):
        stock.config.data.micro_batch_size_per_gpu = size
        stock.optimizer.param_groups[0]["lr"] = 0.0
        losses.append(stock.training_step(stock_batch(ours))["train/loss"])
    assert abs(losses[0] - losses[1]) > 1e-3 * losses[1]  # a mean of micro-batch means; ours: test_loss_is_global


def test_verls_validation_drops_samples(
    ours: SFTTrainer, stock: FSDPSFTTrainer, quickstart: Path, tmp_path: Path
) -> None:
    stock.config.ulysses_sequence_parallel_size = 1
    few = small_config(quickstart, tmp_path, "data.val_max_samples=3", "data.micro_batch_size_per_gpu=4")
    trainer = make_trainer(few)
    stock.config.data.micro_batch_size_per_gpu = 4
    stock._build_dataloader(ours.train_dataset, trainer.val_dataset)
    assert len(stock.val_dataloader) == 0  # its fit then crashes in torch.stack of an empty list
    assert stock.train_dataloader.num_workers == 8
    assert stock.train_dataloader.pin_memory
    counted = int(sum(trainer.val_dataset[i]["loss_mask"][1:].sum() for i in range(3)))
    assert trainer.validate()["val/num_loss_tokens"] == counted
    assert isinstance(trainer.train_dataloader, Prefetcher)  # one thread, whose batches are in memory anyway


def test_second_validation_needs_neither_model_directory_nor_plan(
    quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(quickstart / "model", model)
    trainer = make_trainer(small_config(quickstart, tmp_path, f"model.partial_pretrain={model}"))
    before = trainer.validate()["val/loss"]
    shutil.rmtree(model)
    monkeypatch.setattr(MicroBatchPlan, "assign", None)
    assert trainer.validate()["val/loss"] == before


def test_verl_requires_flash_attention(stock: FSDPSFTTrainer) -> None:
    stock.lora = False
    with pytest.raises(ImportError, match="FlashAttention2"):
        stock._build_model_optimizer()
    assert pick_attention("auto", "cpu", torch.float32) == "sdpa"
    with pytest.raises(UserError, match="needs a GPU"):
        pick_attention("flash_attention_2", "cpu", torch.float32)
