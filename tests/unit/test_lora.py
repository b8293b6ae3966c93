"""Adapters from `model.lora_adapter_path`, which a run continues to train, as docs/guides/sft.md guarantees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers.trainer import make_trainer, small_config
from verl_ext.distributed import to_full
from verl_ext.errors import UserError
from verl_ext.trainer.config import ModelConfig
from verl_ext.trainer.model import LowRankScaledLinear, add_lora

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


def test_scaled_adapters_equal_those_of_peft(adapters: Path, quickstart: Path) -> None:
    def pretrained() -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(quickstart / "model")

    theirs = PeftModel.from_pretrained(pretrained(), adapters, is_trainable=True)
    ours = add_lora(pretrained(), ModelConfig(partial_pretrain="", lora_adapter_path=str(adapters)))
    layers = [module for module in ours.modules() if isinstance(module, LowRankScaledLinear)]
    assert layers and all(layer.scaling == {"default": 2} for layer in layers)
    inputs = torch.arange(12).view(2, 6)
    found = []
    for model in (theirs, ours):
        model.train()
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        found.append([loss, *(each.grad for name, each in model.named_parameters() if ".lora_" in name)])
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-7) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("setting", [{"trainable_token_indices": [3, 4]}, {"layer_replication": [[0, 2], [1, 2]]}])
def test_rejects_adapters_that_cannot_be_sharded(
    setting: dict[str, object], adapters: Path, quickstart: Path, tmp_path: Path
) -> None:
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    with pytest.raises(UserError, match=f"lora_adapter_path=.*adapters was trained with {next(iter(setting))}"):
        make_trainer(small_config(quickstart, tmp_path / "run", f"model.lora_adapter_path={adapters}"))


def test_rejects_directory_without_adapters(quickstart: Path, tmp_path: Path) -> None:
    config = small_config(quickstart, tmp_path / "run", f"model.lora_adapter_path={quickstart}")
    with pytest.raises(UserError, match=r"the LoRA adapters cannot be created: .*model.lora_adapter_path"):
        make_trainer(config)
