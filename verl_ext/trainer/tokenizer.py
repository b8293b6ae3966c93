"""The model's tokenizer with the chat template that the configuration gives it."""

from __future__ import annotations

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase
from verl.utils import hf_tokenizer

from verl_ext.config.inputs import chat_template_text
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_code import require_no_code
from verl_ext.trainer.model import local_model_path


def load_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.partial_pretrain`; `data.chat_template` (a Jinja file or its text) replaces its own.

    Raises:
        UserError: the tokenizer cannot be loaded, the model asks for code to be run, or there is no template file.
    """
    path, trusted = local_model_path(config), config.model.trust_remote_code
    require_no_code(path, trusted)
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=trusted)
    except Exception as error:  # a damaged tokenizer.json raises a bare Exception
        first_line = first_line_of(error)
        raise UserError(
            f"the tokenizer of {config.model.partial_pretrain} cannot be loaded ({first_line}); "
            "give a local model directory, or see to the name and the network"
        ) from error
    template = config.data.chat_template
    if template is not None:
        tokenizer.chat_template = chat_template_text(template)
    return tokenizer
