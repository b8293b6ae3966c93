"""Tiny real models with a chat template, random or with answers learnt by heart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most 320 tokens.

    Args:
        texts: what its merges are learnt from; without, each byte is a token.
    """
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
    """A random model, the same each time.

    Args:
        tokenizer: gives the vocabulary.
        max_model_len: positions.
    """
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
    """Train until the model knows the answers by heart, in a few seconds.

    Args:
        model: changed in place.
        tokenizer: the model's.
        answers: by prompt.
    """
    chats = [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        for prompt, answer in answers.items()
    ]
    batch = tokenizer(chats, padding=True, padding_side="right", return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is ten times slower on threads that wait for a busy machine
    for _ in range(120):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(num_threads)


def save(directory: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write an export; returns its directory."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
