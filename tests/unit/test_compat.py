"""Each patch in verl_ext/compat.py is needed with the installed libraries, and works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations import flash_attention
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.fsdp_utils import apply_fsdp2

from tests.helpers import ROOT

LOOKS_FOR_VERL = """
import sys
import verl_ext
from importlib.util import find_spec
find_spec("verl")
print("transformers" in sys.modules)
"""


def output_of(code: str) -> str:
    """The stdout and stderr of a new interpreter."""
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout


def small_qwen2() -> Qwen2ForCausalLM:
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2)
    return Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2))


def test_locating_verl_imports_nothing() -> None:
    assert output_of(LOOKS_FOR_VERL) == "False\n"


def test_renamed_transformers_class_is_available() -> None:
    assert "cannot import name 'AutoModelForVision2Seq'" in output_of("import verl.utils.fsdp_utils"), (
        "the repair can go"
    )
    from transformers import AutoModelForVision2Seq

    assert AutoModelForVision2Seq is transformers.AutoModelForImageTextToText


class BareConfig(PreTrainedConfig):
    model_type = "bare"


class BareModel(PreTrainedModel):
    config_class = BareConfig
    _no_split_modules = ["Linear"]

    def __init__(self, config: BareConfig) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(2, 2)
        self.post_init()


@pytest.mark.parametrize("make", [small_qwen2, lambda: BareModel(BareConfig())], ids=["a set of layers", "not tied"])
def test_verl_shards_layers_named_by_model(one_rank: None, make: Any) -> None:
    model = make()
    apply_fsdp2(model, {"mesh": init_device_mesh("cpu", (1,))}, {})
    layers = [module for module in model.modules() if type(module).__name__.endswith(("DecoderLayer", "Linear"))]
    sharded = [module for module in layers if isinstance(module, FSDPModule)]
    assert len(sharded) == (2 if isinstance(model, Qwen2ForCausalLM) else 1)


def test_verl_patches_models_without_trl_value_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    import trl

    assert not hasattr(trl, "AutoModelForCausalLMWithValueHead"), "the repair can go"
    former = flash_attention._flash_attention_forward
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", former)  # undone at the end
    apply_monkey_patch(small_qwen2(), ulysses_sp_size=2)
    assert flash_attention._flash_attention_forward is not former


def test_verl_dataset_masks_non_assistant_turns(quickstart: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    chat = [{"role": role, "content": text} for role, text in (("user", "1+1"), ("assistant", "2"), ("user", "2+2"))]
    pd.DataFrame({"messages": [chat]}).to_parquet(tmp_path / "chat.parquet")
    sample = MultiTurnSFTDataset(str(tmp_path / "chat.parquet"), tokenizer, {"pad_mode": "no_padding"})[0]
    expected = tokenizer.apply_chat_template(chat, return_dict=False)
    assert sample["input_ids"].tolist() == expected
    trained = tokenizer.decode(sample["input_ids"][sample["loss_mask"].bool()])
    assert trained.startswith("2") and "assistant" not in trained and "user" not in trained
