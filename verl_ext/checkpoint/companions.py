"""The small files of `huggingface/`: configuration, generation settings, tokenizer, code of the model's own."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save

from verl_ext.checkpoint.layout import EXPORT
from verl_ext.model_files import save_config, save_tokenizer


def companion_files(
    model: PreTrainedModel | PeftModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> dict[str, bytes]:
    """Content by path relative to the checkpoint; they do not change during a run, so they are made once.

    Args:
        model: whose configuration is written.
        tokenizer: with its chat template.
        dtype: of the exported weights.
    """
    base: PreTrainedModel = model.get_base_model() if isinstance(model, PeftModel) else model
    config = copy.deepcopy(base.config)
    config.dtype = dtype
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        save_config(config, root)
        if getattr(config, "auto_map", None):
            custom_object_save(base, root, config=config)
        if base.can_generate():
            # to_json_string instead of save_pretrained, which refuses some generation configs that models ship with
            (root / "generation_config.json").write_text(base.generation_config.to_json_string())
        save_tokenizer(tokenizer, root)
        found = sorted(path for path in root.rglob("*") if path.is_file())
        return {f"{EXPORT}/{path.relative_to(root)}": path.read_bytes() for path in found}
