"""What every side of the SFT benchmark trains on: functions of the standard library, and a model of 26M parameters.

The tokenizer is made from the same functions, so that a token is as much text as with a tokenizer made for code.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from verl_ext.data.prepare import prepare

TURNS = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
TEMPLATE = TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
VOCAB_SIZE = 16384


def write_inputs(directory: Path) -> None:
    """`chats/train.parquet` and `model/`."""
    prepare(["stdlib", "--output", str(directory / "chats")])
    chats = pd.read_parquet(directory / "chats/train.parquet")["messages"]
    tokenizer = make_tokenizer([turn["content"] for chat in chats for turn in chat])
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=512, intermediate_size=1408, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, architectures=["Qwen2ForCausalLM"],
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE of these texts, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=SPECIAL, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=SPECIAL[1], pad_token=SPECIAL[2])
    fast.chat_template = TEMPLATE
    return fast
