"""Which tokens end what a model writes."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedTokenizerBase


def end_tokens(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What vLLM stops at: the tokens that the model's generation settings name, and the tokenizer's end of text."""
    named = None if settings is None else settings.eos_token_id
    listed = named if isinstance(named, list) else [named]
    return list(dict.fromkeys(token for token in (*listed, tokenizer.eos_token_id) if token is not None))
