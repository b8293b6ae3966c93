"""The model's tokenizer with the chat template that the configuration gives it."""

from __future__ import annotations

import sys

from transformers import PreTrainedTokenizerBase
from verl.utils import hf_tokenizer

from verl_ext.console import print_line
from verl_ext.data.chat_template import renders_alike
from verl_ext.data.config import TextDataConfig
from verl_ext.data.training_templates import NAMES, read_chat_template, without_marks
from verl_ext.errors import UserError, first_line_of
from verl_ext.remote_code import require_no_remote_code
from verl_ext.trainer.model import local_model_path
from verl_ext.trainer.stages import RunConfig


def load_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.partial_pretrain`, with the template of `data.chat_template` in the place of its own.

    Raises:
        UserError: the tokenizer cannot be loaded, the model asks for code to be run, or there is no such template.
    """
    tokenizer = _own_tokenizer(config)
    if isinstance(config.data, TextDataConfig) and config.data.chat_template is not None:
        tokenizer.chat_template = read_chat_template(str(config.data.chat_template))
    return tokenizer


def tokenizer_of_exports(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, tells: bool = False
) -> PreTrainedTokenizerBase:
    """What exports get: the tokenizer of the training, but not a template of ours that is only for training.

    They keep the model's own template if it renders prompts as the training template does; otherwise they get the
    training template without its marks, which not every server knows.

    Args:
        config: the configuration as the user gave it.
        tokenizer: of `load_tokenizer`.
        tells: whether this rank tells the user about the second case.
    """
    data = config.data
    if not isinstance(data, TextDataConfig) or data.chat_template not in NAMES:
        return tokenizer
    name = data.chat_template
    exported, training = _own_tokenizer(config), read_chat_template(name)
    kwargs = dict(data.apply_chat_template_kwargs)
    if exported.chat_template:
        if renders_alike(exported, exported.get_chat_template(), training, kwargs, whole=False):
            return exported
        why = "the model's own one renders prompts differently"
    else:
        why = "the model has none"
    if tells:
        print_line(f"Exports get {name} as their chat template, because {why}.", sys.stderr)
    exported.chat_template = without_marks(training)
    return exported


def _own_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    path, trusted = local_model_path(config), config.model.trust_remote_code
    require_no_remote_code(path, trusted)
    try:
        return hf_tokenizer(path, trust_remote_code=trusted)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        first_line = first_line_of(error)
        raise UserError(
            f"the tokenizer of {config.model.partial_pretrain} cannot be loaded ({first_line}); "
            "give a local model directory, or see to the name and the network"
        ) from error
