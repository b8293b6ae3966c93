"""A model directory has the files and keys that earlier releases of transformers and vLLM read."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.helpers.models import CHATML
from verl_ext.errors import UserError, remedy_for
from verl_ext.model_files import (
    check_model_files,
    earlier_rope_keys,
    load_pretrained_strict,
    save_config,
    save_tokenizer,
)

TEXT = "def f(x):\n    return x + 12  # naïve<|im_end|>\n"
LETTERS = sorted({*pre_tokenizers.ByteLevel.alphabet()})
NAMES = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"}


def byte_tokenizer(model: Any) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose end-of-turn token is not in the model's vocabulary."""
    backend = Tokenizer(model)
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    special = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHATML, **special)


VOCABULARY = {letter: number for number, letter in enumerate([*LETTERS, "re", "tu", "retu", "<unk>"])}
MODELS = {
    "bpe": models.BPE(vocab=VOCABULARY, merges=[("r", "e"), ("t", "u"), ("re", "tu")]),
    "word level": models.WordLevel(vocab=VOCABULARY, unk_token="<unk>"),
    "unigram": models.Unigram([(piece, -1.0) for piece in VOCABULARY], unk_id=VOCABULARY["<unk>"]),
}


@pytest.mark.parametrize("kind", MODELS)
def test_saved_tokenizer_has_every_file(kind: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MODELS[kind])
    save_tokenizer(tokenizer, tmp_path)
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= NAMES and ("merges.txt" in written) == (kind == "bpe")
    assert json.loads((tmp_path / "vocab.json").read_text()) == VOCABULARY
    assert json.loads((tmp_path / "added_tokens.json").read_text()) == {"<|im_start|>": 260, "<|im_end|>": 261}
    special = json.loads((tmp_path / "special_tokens_map.json").read_text())
    assert special["eos_token"] == "<|im_end|>" and special["additional_special_tokens"] == ["<|im_start|>"]
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(TEXT).input_ids == tokenizer(TEXT).input_ids and loaded.extra_special_tokens == ["<|im_start|>"]
    assert (loaded.eos_token, loaded.chat_template) == ("<|im_end|>", CHATML)


def test_tokenizer_config_is_readable_by_transformers_4(tmp_path: Path) -> None:
    """transformers 4 does not know `TokenizersBackend`, and accepts `extra_special_tokens` only as a mapping."""
    save_tokenizer(byte_tokenizer(MODELS["bpe"]), tmp_path)
    content = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert content["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in content and content["additional_special_tokens"] == ["<|im_start|>"]


def test_vocabulary_and_merges_reproduce_tokens(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(MODELS["bpe"])
    save_tokenizer(tokenizer, tmp_path)
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.model = models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))
    assert backend.encode(TEXT).ids == tokenizer(TEXT).input_ids
    assert VOCABULARY["retu"] in backend.encode(TEXT).ids


def test_merges_with_line_breaks_are_not_written(tmp_path: Path) -> None:
    """Gemma has such merges."""
    save_tokenizer(byte_tokenizer(models.BPE(vocab={"\n": 0, "\n\n": 1}, merges=[("\n", "\n")])), tmp_path)
    assert (tmp_path / "vocab.json").exists() and not (tmp_path / "merges.txt").exists()


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("qwen2", {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
        ("phi3", {"rope_theta": 2e4, "partial_rotary_factor": 0.5}, {"rope_theta": 2e4, "partial_rotary_factor": 0.5}),
        ("gpt_neox", {"rotary_emb_base": 2e4}, {"rotary_emb_base": 2e4, "rotary_pct": 0.25}),
        ("gemma3_text", {"rope_theta": 2e6}, {"rope_theta": 2e6, "rope_local_base_freq": 1e4, "rope_scaling": None}),
    ],
)
def test_rope_settings_are_written_in_old_and_new_form(
    model_type: str, settings: dict, expected: dict, tmp_path: Path
) -> None:
    config = AutoConfig.for_model(model_type, **deepcopy(settings))  # which transformers completes in place
    save_config(config, tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    assert {key: content[key] for key in expected} == expected
    assert content["rope_parameters"] == config.rope_parameters
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_nested_rope_settings_are_written_in_old_and_new_form(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1]}
    config = AutoConfig.for_model("qwen2_5_vl", text_config={"rope_theta": 3e6, "rope_scaling": dict(rope)})
    save_config(config, tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert text["rope_theta"] == 3e6 and text["rope_scaling"] == rope
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert loaded.text_config.rope_parameters == config.text_config.rope_parameters
    assert loaded.vision_config.to_dict() == config.vision_config.to_dict()


def test_rope_types_unknown_to_transformers_4_are_unchanged() -> None:
    assert earlier_rope_keys({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e6}}) == {}
    assert earlier_rope_keys({"rope_parameters": None}) == earlier_rope_keys({}) == {}


@pytest.mark.parametrize("is_tied", [True, False])
def test_rejects_model_with_missing_weights(is_tied: bool, tmp_path: Path) -> None:
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2)
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=is_tied)).save_pretrained(tmp_path)
    assert load_pretrained_strict(AutoModelForCausalLM, str(tmp_path)).config.num_hidden_layers == 2
    weights = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in weights) != is_tied
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="lacks 1 of the model's weights, model.layers.1.mlp.up_proj.weight among them"):
        load_pretrained_strict(AutoModelForCausalLM, str(tmp_path))


def test_model_file_without_read_permission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(Qwen2Config(num_hidden_layers=2), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.touch()
    check_model_files(str(tmp_path), trusted=False)
    monkeypatch.setattr(os, "access", lambda path, mode: path != weights)  # root may read every file
    with pytest.raises(UserError, match=f"cannot read {weights} .no permission.; ask its owner"):
        check_model_files(str(tmp_path), trusted=False)


@pytest.mark.parametrize(
    ("error", "is_lack"),
    [
        (RuntimeError("can't start new thread"), True),
        (OSError("Failed to launch worker thread: Resource temporarily unavailable"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (OSError("Error no file named model.safetensors"), False),
    ],
)
def test_lack_of_threads_or_memory_is_not_blamed_on_file(error: Exception, is_lack: bool) -> None:
    assert remedy_for(error, "restore it").startswith("raise the limits" if is_lack else "restore it")
