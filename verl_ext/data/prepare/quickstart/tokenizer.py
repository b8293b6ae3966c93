"""A byte-level BPE tokenizer of Qwen2's kind, trained on the quickstart data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import Qwen2TokenizerFast

MAX_VOCABULARY = 1000
PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer(conversations: list[list[dict[str, str]]]) -> Qwen2TokenizerFast:
    """Train the tokenizer on whole conversations, roles included, so that the template's words are single tokens.

    Args:
        conversations: lists of messages with role and content.

    Returns:
        A tokenizer with a ChatML template without a default system prompt; a turn ends with `<|im_end|>`, its EOS.
    """
    from tokenizers.trainers import BpeTrainer
    from transformers import Qwen2TokenizerFast

    alphabet, tokenizer = _untrained()
    trainer = BpeTrainer(
        vocab_size=MAX_VOCABULARY,
        min_frequency=2,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    turns = (f"{message['role']}\n{message['content']}" for messages in conversations for message in messages)
    tokenizer.train_from_iterator(turns, trainer)
    return Qwen2TokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        unk_token=PAD,
        additional_special_tokens=[TURN_START, TURN_END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _untrained() -> tuple[list[str], Tokenizer]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            # One token a digit: the model copies numbers that it has never seen whole.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return pre_tokenizers.ByteLevel.alphabet(), tokenizer
