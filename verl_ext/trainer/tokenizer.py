"""Loads the tokenizer, its chat template, and the token that ends an assistant's turn."""

from __future__ import annotations

import sys
from collections import Counter

from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.checkpoint.hf_tensors import unwrap_peft
from verl_ext.console import print_line, warn
from verl_ext.data.chat_template import ChatTemplate, renders_alike, stop_token_ids
from verl_ext.data.config import TextDataConfig
from verl_ext.data.dataset import SampleDataset
from verl_ext.data.training_templates import TEMPLATE_NAMES, read_chat_template, without_marks
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import require_no_remote_code
from verl_ext.trainer.model import generation_config_of, local_model_path
from verl_ext.trainer.stages import GRPOConfig, RunConfig
from verl_ext.verl_api import hf_tokenizer


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.partial_pretrain`, with the template of `data.chat_template` if it is set.

    Raises:
        UserError: the tokenizer cannot be loaded, the model ships code that may not run, or the template is missing.
    """
    tokenizer = _own_tokenizer(config)
    if isinstance(config.data, TextDataConfig) and config.data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(str(config.data.chat_template))
    return tokenizer


def tokenizer_of_exports(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prints: bool
) -> PreTrainedTokenizerBase:
    """Return the tokenizer for exports: the tokenizer of training, but without our training templates.

    Exports keep the model's own template if it renders prompts like the training template. Otherwise, they get the
    training template without its generation marks, which some servers do not support.

    Args:
        prints: whether this rank reports the second case.
    """
    data = config.data
    if not isinstance(data, TextDataConfig) or data.chat_template not in TEMPLATE_NAMES:
        return tokenizer
    name = data.chat_template
    exported, training = _own_tokenizer(config), read_chat_template(name)
    kwargs = dict(data.apply_chat_template_kwargs)
    if exported.chat_template:
        if renders_alike(exported, exported.get_chat_template(), training, kwargs, whole=False):
            return exported
        why = "the model's own template renders prompts differently"
    else:
        why = "the model has none"
    if prints:
        print_line(f"Exports use {name} as their chat template, because {why}.", sys.stderr)
    exported.chat_template = without_marks(training)
    return exported


def _own_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    path, trusted = local_model_path(config), config.model.trust_remote_code
    require_no_remote_code(path, trusted)
    try:
        return hf_tokenizer(path, trust_remote_code=trusted)
    except Exception as error:  # a damaged tokenizer.json raises a plain Exception
        first_line = first_line_of(error)
        raise UserError(
            f"the tokenizer of {config.model.partial_pretrain} cannot be loaded ({first_line}); "
            "specify a local model directory, or check the name and the network"
        ) from error


def missing_eos_token(end_tokens: Counter[int], known: list[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the special token that ends most turns, if it is not among the `known` stop tokens.

    Ordinary tokens do not count, because a chat that is truncated at `data.max_length` may end with any of them.
    """
    added = tokenizer.added_tokens_decoder
    special = [(count, token) for token, count in end_tokens.items() if token in added and added[token].special]
    most_frequent = max(special, default=(0, None))[1]
    return None if most_frequent in known else most_frequent


def sync_eos_token(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, end_tokens: Counter[int], is_main: bool
) -> None:
    """Add the token that ends turns to the generation settings, which exports, evaluation and later stages use.

    The end-of-text token of a base model often differs from the end-of-turn token of its chat template: Qwen2.5 has
    `<|endoftext|>` and `<|im_end|>`. Trained on chats, it generates the latter, but would not stop there.

    Args:
        model: the model whose generation settings change if necessary.
        end_tokens: number of samples by last loss token; for GRPO, `turn_end_tokens`.
        is_main: whether this rank prints messages.
    """
    base = unwrap_peft(model)
    known = stop_token_ids(base.generation_config if base.can_generate() else None, tokenizer)
    found = missing_eos_token(end_tokens, known, tokenizer)
    if found is not None and base.can_generate():
        base.generation_config.eos_token_id = [found, *known]
        if is_main:
            name = tokenizer.convert_ids_to_tokens(found)
            sentence = f"Turns end with {name}, which is not a stop token of this model; exports add it"
            print_line(sentence, sys.stderr)
    elif is_main and end_tokens:
        warn_if_endless(end_tokens, known)


def turn_end_tokens(config: TextDataConfig, tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    """Return the token that the chat template writes after an answer; empty unless it is a single special token."""
    end = ChatTemplate(tokenizer, config.apply_chat_template_kwargs).turn_end
    return Counter([tokenizer.convert_tokens_to_ids(end)] if end else [])


def rollout_stop_tokens(config: GRPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that end completions: those of the model's files, and the one that `sync_eos_token` adds."""
    known = stop_token_ids(generation_config_of(local_model_path(config)), tokenizer)
    found = missing_eos_token(turn_end_tokens(config.data, tokenizer), known, tokenizer)
    return known if found is None else [found, *known]


def check_end_tokens(config: RunConfig, tokenizer: PreTrainedTokenizerBase, end_tokens: Counter[int]) -> None:
    """Warn of turns without an end as `sync_eos_token` does, without loading the model."""
    known = stop_token_ids(generation_config_of(local_model_path(config)), tokenizer)
    if missing_eos_token(end_tokens, known, tokenizer) is None:  # exports add a missing one
        warn_if_endless(end_tokens, known)


def warn_if_endless(end_tokens: Counter[int], known: list[int]) -> None:
    """Warn if no sample ends with one of the `known` stop tokens; see `sync_eos_token`."""
    if not end_tokens.keys() & set(known):
        warn(
            "no turn ends with a stop token of the model, so its answers will run to the length limit; "
            "end turns with the tokenizer's eos_token in data.chat_template, or raise data.max_length"
        )


def require_embeddings(dataset: SampleDataset, tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> None:
    """Refuse samples with tokens that the model has no embeddings for.

    A tokenizer may have such tokens if no sample uses them: Gemma 3's has one for images.

    Raises:
        UserError: names a sample and its token.
    """
    found = dataset.first_token_from(num_embeddings)
    if found is not None:
        index, token = found
        name = tokenizer.convert_ids_to_tokens(token)
        raise UserError(
            f"{dataset.describe([index])}: token {token} ({name!r}) exceeds the model's {num_embeddings} embeddings; "
            "use the model's own tokenizer, or call model.resize_token_embeddings(len(tokenizer)) and save the model"
        )
