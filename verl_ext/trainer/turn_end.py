"""What ends an assistant's turn in the training data also ends the answers of the model that was trained on them."""

from __future__ import annotations

import sys
from collections import Counter

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.console import print_line, warn
from verl_ext.data.chat_template import stop_token_ids


def unnamed_turn_end(turn_ends: Counter[int], known: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that most turns end with, unless it is known to end them.

    Ordinary tokens do not count: a chat that was cut at `data.max_length` ends with any of them.
    """
    added = tokenizer.added_tokens_decoder
    special = [(count, token) for token, count in turn_ends.items() if token in added and added[token].special]
    most_frequent = max(special, default=(0, None))[1]
    return None if most_frequent in known else most_frequent


def stop_at_turn_end(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, turn_ends: Counter[int], is_main: bool
) -> None:
    """Add what ends a turn in the data to the generation settings, which exports, evaluation and GRPO go by.

    A base model often ends a text with another token than its chat template ends a turn with: Qwen2.5's with
    `<|endoftext|>` and `<|im_end|>`. Trained on chats it writes the latter, and would be made to write on behind it.

    Args:
        model: whose generation settings are changed, if they have to be.
        tokenizer: with the chat template.
        turn_ends: how many samples have each token as their last learnt one.
        is_main: whether this rank tells of it.
    """
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    known = stop_token_ids(base.generation_config if base.can_generate() else None, tokenizer)
    found = unnamed_turn_end(turn_ends, known, tokenizer)
    if found is not None and base.can_generate():
        base.generation_config.eos_token_id = [found, *known]
        if is_main:
            name = tokenizer.convert_ids_to_tokens(found)
            sentence = f"Turns end with {name}, which was not a stop token of this model; its exports add it"
            print_line(sentence, sys.stderr)  # verl's constructor runs with stdout closed
    elif is_main and not turn_ends.keys() & set(known):
        warn(
            "no turn ends with a stop token of the model, so its answers will run to the length limit; "
            "end turns with the tokenizer's eos_token in data.chat_template, or raise data.max_length"
        )
