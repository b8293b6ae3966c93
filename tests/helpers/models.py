"""Tiny real models with a chat template, with random weights or overfitted to a few answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
        tokenizer: of the model.
        answers: by prompt.
    """
    import torch

    chats = [
        f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>"
        for prompt, answer in answers.items()
    ]
    batch = tokenizer(chats, padding=True, padding_side="right", return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads make so small a model ten times slower on a busy machine
    for _ in range(120):
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(num_threads)


def save(directory: Path, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Save an export and return its directory."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
