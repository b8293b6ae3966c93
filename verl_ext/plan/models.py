"""Which model a configuration names: its directory, the hub's cache, the hub, or a built-in table without a network."""

from __future__ import annotations

from pathlib import Path

import requests
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from transformers import AutoConfig, PretrainedConfig

from verl_ext.commands import program
from verl_ext.config.compose import load_yaml
from verl_ext.config.schema import value_at
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import is_hub_name, read_json
from verl_ext.remote_code import require_no_remote_code
from verl_ext.trainer.stages import GRPOConfig, SFTConfig, sft_recipe_of

_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "use_sliding_window": False}
_QWEN2_7B = {
    **_QWEN2,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
_QWEN2_1_5B = {
    **_QWEN2,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
_SMOLLM2_135M = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
BUILT_IN = {
    "Qwen/Qwen2.5-Coder-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2.5-Coder-7B": _QWEN2_7B,
    "Qwen/Qwen2.5-7B-Instruct": _QWEN2_7B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN2_1_5B,
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": _QWEN2_1_5B,
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "data/smollm2_135m": _SMOLLM2_135M,  # what `prepare smollm2` takes from an installed package
}
"""The `config.json` of models that recipes name, as far as it decides sizes (by the models' pages on the hub)."""


def find_model(config: SFTConfig | GRPOConfig) -> tuple[PretrainedConfig, list[str]]:
    """The model's own configuration, and what has to be said about where it is from.

    Raises:
        UserError: no model is named, or its dimensions cannot be had.
    """
    name, notes = named_model(config)
    if name.startswith("~"):
        name = str(Path(name).expanduser())
    error: Exception = OSError(name)
    for asks_hub in (False, True):  # the disk and the cache first
        if not asks_hub or (is_hub_name(name) and hub_answers()):
            try:
                return read(name, config, local_files_only=not asks_hub), notes
            except (OSError, ValueError) as failure:  # what transformers raises for a missing or a damaged file
                error = failure
    if name in BUILT_IN:
        return AutoConfig.for_model(**BUILT_IN[name]), [
            *notes,
            f"{name} cannot be read here; its dimensions are built in",
        ]
    if is_hub_name(name):
        raise UserError(
            f"model.partial_pretrain={name} is neither here nor can it be had from the hub; name another model"
        )
    if Path(name).exists():
        raise UserError(f"model.partial_pretrain={name} cannot be read ({first_line_of(error)}); name another model")
    commands = " and ".join(f"`{program('prepare')} {each}`" for each in config.prepare)
    raise UserError(f"model.partial_pretrain={name} is not there; {commands or 'make it'} first, or name another model")


def read(name: str, config: SFTConfig | GRPOConfig, local_files_only: bool) -> PretrainedConfig:
    """transformers' configuration of a directory or a hub name."""
    trusted = config.model.trust_remote_code
    if (local := Path(name) / "config.json").is_file():
        read_json(local)  # transformers fails on other JSON with whatever exception
    require_no_remote_code(name, trusted, local_files_only)
    return AutoConfig.from_pretrained(name, trust_remote_code=trusted, local_files_only=local_files_only)


def hub_answers() -> bool:
    """Whether the hub can be reached; asked once, as transformers would try for half a minute."""
    if HF_HUB_OFFLINE:
        return False
    try:
        return requests.head(ENDPOINT, timeout=3).ok
    except requests.RequestException:
        return False


def named_model(config: SFTConfig | GRPOConfig) -> tuple[str, list[str]]:
    """`model.partial_pretrain`, or the model that the SFT run before it begins with.

    Raises:
        UserError: neither is known.
    """
    model = config.model
    if model.partial_pretrain is not None:
        return str(model.partial_pretrain), []
    run_dir = value_at(config, "model.sft_run")
    recipe = sft_recipe_of(Path(run_dir)) if run_dir else None
    if recipe is not None:
        start = load_yaml(recipe)["model"]["partial_pretrain"]
        return str(start), [f"{run_dir} is taken to be a run of recipe={recipe.stem}"]
    raise UserError(f"model.sft_run={run_dir} is no run of a recipe that is here; give model.partial_pretrain")
