"""Adapters from `model.lora_adapter_path`, which a run continues to train, as docs/guides/sft.md guarantees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.distributed import to_full
from verl_ext.errors import UserError

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def adapters(quickstart: Path, tmp_path: Path) -> Path:
    """Adapters that change the output of the small model."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(quickstart / "model"),
        LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"]),
    )
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


def test_only_given_adapters_are_trained(adapters: Path, quickstart: Path, tmp_path: Path) -> None:
    overrides = (f"model.lora_adapter_path={adapters}", "optim.lr=1e-2")
    trainer = make_trainer(small_config(quickstart, tmp_path / "run", *overrides))
    before = {name: to_full(tensor).detach().clone() for name, tensor in trainer.model.named_parameters()}
    kept = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    kept.load_adapter(str(adapters))
    given = {name: tensor for name, tensor in kept.named_parameters() if ".lora_" in name}
    found = {name.removeprefix("base_model.model."): name for name in before if ".lora_" in name}
    assert found.keys() == given.keys() and all(3 in tensor.shape for tensor in given.values())
    assert all(torch.equal(before[found[name]], given[name]) for name in given)
    for _, batch in zip(range(2), trainer.batches(), strict=False):  # the learning rate begins at 0
        trainer.training_step(batch)
    after = {name: to_full(tensor).detach().clone() for name, tensor in trainer.model.named_parameters()}
    assert {name for name in after if not torch.equal(after[name], before[name])} == set(found.values())


def test_rejects_directory_without_adapters(quickstart: Path, tmp_path: Path) -> None:
    config = small_config(quickstart, tmp_path / "run", f"model.lora_adapter_path={quickstart}")
    with pytest.raises(UserError, match=r"the LoRA adapters cannot be created: .*model.lora_adapter_path"):
        make_trainer(config)
