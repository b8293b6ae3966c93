"""Tiny real models with a chat template, with random weights or overfitted to a few answers."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
        Qwen2ForCausalLM,
    )

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "max_position_embeddings": 1024},
}
OLD_SHAPE = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
FALCON_SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
HEAD = {**SHAPE, "head_dim": 32}
WINDOW = {"sliding_window": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
JAMBA = {
    **{"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4},
    **{"use_mamba_kernels": False, "num_experts_per_tok": 2},
}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA4 = {
    **{"num_hidden_layers": 4, "layer_types": 2 * MIXED["layer_types"], "num_kv_shared_layers": 2, **WINDOW},
    **{"global_head_dim": 64, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512},
}
LINEAR = {
    **{"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
PACKING_FAMILIES: dict[str, tuple[str, dict]] = {
    "llama": ("llama", SHAPE),
    "qwen2": ("qwen2", SHAPE),
    "qwen3": ("qwen3", HEAD),
    "gemma3": ("gemma3_text", {**HEAD, **MIXED, "query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4_text", {**HEAD, **GEMMA4}),
    "gpt_neox": ("gpt_neox", {name: size for name, size in SHAPE.items() if name != "num_key_value_heads"}),
    "phi3": ("phi3", SHAPE),
    "olmo2": ("olmo2", SHAPE),
    "starcoder2": ("starcoder2", {**SHAPE, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "mistral with a window": ("mistral", {**SHAPE, **WINDOW}),
    "smollm3": ("smollm3", {**SHAPE, "num_hidden_layers": 4}),
    "mixtral": ("mixtral", {**SHAPE, "num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", {**HEAD, **EXPERTS, "num_experts": 4}),
    "glm4_moe": ("glm4_moe", {**HEAD, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1}),
    "granite": ("granite", SHAPE),
    "gpt2": ("gpt2", {**OLD_SHAPE, **NO_DROPOUT}),
}
PADDING_FAMILIES: dict[str, tuple[str, dict]] = {
    "gemma2": ("gemma2", {**HEAD, **WINDOW, "query_pre_attn_scalar": 16}),
    "falcon": ("falcon", FALCON_SHAPE),
    "falcon with alibi": ("falcon", {**FALCON_SHAPE, "alibi": True}),
    "stablelm": ("stablelm", SHAPE),
    "bloom": ("bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "gpt_oss": ("gpt_oss", {**HEAD, **MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_5": ("qwen3_5_text", {**HEAD, **LINEAR}),
    "mamba": ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}),
    "jamba": ("jamba", {**SHAPE, **JAMBA}),
}
"""Model type and settings of tiny models whose samples can be packed into one row, and of others."""


@dataclass(frozen=True)
class Support:
    """What can be done with the models of a family that people fine-tune today; a page of the reference has the table.

    Attributes:
        models: name of the models.
        family: key of `PACKING_FAMILIES` or `PADDING_FAMILIES`.
        reasons: reason for each entry of `CELLS` that does not work.
    """

    models: str
    family: str
    reasons: Mapping[str, str] = field(default_factory=dict)


CELLS = ("SFT", "packing", "LoRA", "evaluation", "GRPO with vllm", "GRPO with hf")
MIXES = "linear attention mixes packed samples"
EAGER = "attention sinks need eager attention"
BFLOAT16 = "on CPUs, vLLM computes linear attention in bfloat16 only"
STALE = "on CPUs, vLLM keeps old weights of experts and attention sinks"
SUPPORT = (
    Support("Qwen3", "qwen3"),
    Support("Qwen3-MoE", "qwen3_moe"),
    Support("Qwen3.5 (text)", "qwen3_5", {"packing": MIXES, "GRPO with vllm": BFLOAT16}),
    Support("Gemma 3 (text)", "gemma3"),
    Support("Gemma 4 (text)", "gemma4"),
    Support("Llama", "llama"),
    Support("Mistral", "mistral with a window"),
    Support("Phi-4", "phi3"),
    Support("SmolLM3", "smollm3"),
    Support("GLM-4.5", "glm4_moe"),
    Support("gpt-oss", "gpt_oss", {"packing": EAGER, "GRPO with vllm": STALE}),
)


def family_config(name: str, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The configuration of a model of `PACKING_FAMILIES` or `PADDING_FAMILIES`."""
    from transformers import AutoConfig

    model_type, settings = {**PACKING_FAMILIES, **PADDING_FAMILIES}[name]
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    return AutoConfig.for_model(model_type, **settings, vocab_size=len(tokenizer), **tokens)


def write_family(name: str, quickstart: Path, directory: Path) -> Path:
    """A copy of the quickstart's directory whose `model/` is of another family, with uneven probabilities."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(family_config(name, tokenizer))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter += 0.05 * torch.randn_like(parameter)
            if parameter_name.endswith("linear_attn.A_log"):
                parameter.fill_(-3.0)  # random states decay at once, so that their gradients are mostly rounding errors
    directory.mkdir()
    for file in ("train.parquet", "val.parquet"):
        (directory / file).symlink_to(quickstart / file)
    save(directory / "model", model, tokenizer)
    return directory


def make_tokenizer(texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 320 tokens.

    Args:
        texts: what the merges are learned from; without any, each byte is a token.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(list(texts) * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, max_model_len: int = 96) -> Qwen2ForCausalLM:
    """A model with random weights that are the same on every call.

    Args:
        tokenizer: determines the vocabulary size.
        max_model_len: number of positions.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=max_model_len,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def learn(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, answers: Mapping[str, str]) -> None:
    """Train until greedy decoding reproduces the answers, which takes a few seconds.

    Args:
        model: changed in place.
        tokenizer: the model's tokenizer.
        answers: answer to each prompt.
    """
    import torch

    starts = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in answers]
    chats = [f"{start}{answer}<|im_end|>" for start, answer in zip(starts, answers.values())]
    batch = tokenizer(chats, padding=True, padding_side="right", return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    learned = labels.clone()
    for row, start in zip(learned, starts):
        row[: len(tokenizer(start)["input_ids"])] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads slow such a small model down tenfold on a busy machine
    try:
        for step in range(600):
            outputs = model(**inputs, labels=labels)
            is_right = (outputs.logits.argmax(-1)[:, :-1] == learned[:, 1:]) | (learned[:, 1:] < 0)
            if step >= 120 and is_right.all():
                return
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
    finally:
        torch.set_num_threads(num_threads)
    raise AssertionError("the model did not learn the answers")


def cache_as_hub(model: Path, name: str, home: Path) -> Path:
    """Copy a model into the cache of a `HF_HOME` as if it had been downloaded from the Hub under this name.

    Returns:
        The directory of the cache, `HF_HUB_CACHE`.
    """
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text(commit)
    (folder / "blobs").mkdir()
    (folder / "snapshots" / commit).mkdir(parents=True)
    for path in model.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, folder / "blobs" / digest)
        (folder / "snapshots" / commit / path.name).symlink_to(Path("../../blobs", digest))
    return home / "hub"


def save(directory: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
    """Save an export and return its directory."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
