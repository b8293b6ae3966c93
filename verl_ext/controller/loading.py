"""Loads a vision-language model with its processor, and tells one model from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.adapters.registry import adapter_of
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_code import require_no_code
from verl_ext.own_code import OwnCode

SAMPLED = 16
"""Values of a tensor that a fingerprint is taken of."""


def default_device() -> tuple[str, torch.dtype]:
    """Where a model runs unless something else is said, and in which precision: a GPU in bfloat16 if there is one."""
    return ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)


def load_adapter(
    path: str,
    tier_sizes: Sequence[int],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    own_adapter: OwnCode | None = None,
) -> VLMAdapter:
    """The adapter of a frozen model.

    Args:
        path: a directory, or a name on the hub.
        tier_sizes: see `VLMAdapter`.
        device: cpu or cuda.
        dtype: of the weights.
        trust_remote_code: run the code that comes with the checkpoint, which Molmo needs.
        own_adapter: see `adapter_of`.

    Raises:
        UserError: it cannot be loaded, or there is no adapter for it.
    """
    name = str(Path(path).expanduser())
    require_no_code(name, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        brings_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
        loader = AutoModelForCausalLM if brings_code else AutoModelForImageTextToText
        model = loader.from_pretrained(name, dtype=dtype, trust_remote_code=trust_remote_code)
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # each part of a damaged model raises an exception of its own kind
        raise UserError(
            f"the vision-language model {path} cannot be loaded ({first_line_of(error)}); give the directory of one, "
            "or trust_remote_code for a model that brings its own code"
        ) from error
    return adapter_of(model.to(device).eval().requires_grad_(False), processor, tier_sizes, own_adapter)


def fingerprint(model: PreTrainedModel) -> str:
    """A short name of a model's architecture and weights, the same wherever it is loaded in one precision.

    It is taken of the configuration and of the first values of each parameter, so that what was measured on one model
    is not taken for another's.
    """
    digest = hashlib.sha256()
    about = {key: value for key, value in model.config.to_dict().items() if not key.startswith(("_", "transformers"))}
    digest.update(json.dumps(about, sort_keys=True, default=str).encode())
    for parameter in model.parameters():
        values = parameter.detach().flatten()[:SAMPLED].float().cpu()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
