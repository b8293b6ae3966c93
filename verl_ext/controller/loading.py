"""Loads a vision-language model with its processor, and tells one model from another."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from verl_ext.console import print_line
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.adapters.registry import adapter_of
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import load_whole
from verl_ext.plugins import Plugin
from verl_ext.remote_code import require_no_remote_code

FINGERPRINT_VERSION = 2
OLD_FINGERPRINT = re.compile("[0-9a-f]{16}")
"""Of the first version."""
SAMPLED = 4
"""Values of each of a tensor's last two dimensions that a fingerprint is taken of."""


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
    own_adapter: Plugin | None = None,
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
    require_no_remote_code(name, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        brings_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
        loader = AutoModelForCausalLM if brings_code else AutoModelForImageTextToText
        model = load_whole(loader, name, dtype=dtype, trust_remote_code=trust_remote_code)
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # each part of a damaged model raises an exception of its own kind
        raise UserError(
            f"the vision-language model {path} cannot be loaded ({first_line_of(error)}); give the directory of one, "
            "or trust_remote_code for a model that brings its own code"
        ) from error
    return adapter_of(model.to(device).eval().requires_grad_(False), processor, tier_sizes, own_adapter)


def fingerprint(model: PreTrainedModel) -> str:
    """A short name of a model's type and weights, so that what was measured on one is not taken for another's.

    It is `VERSION:model_type:digest`, the digest of the shape of each parameter and of its first values: of up to
    `SAMPLED` in each of the last two dimensions. Neither the names and order of the parameters nor the orientation of
    their matrices count, which change with releases of transformers. The precision that a model is loaded in does.
    """
    parts = []
    for parameter in model.parameters():
        values = parameter.detach()
        while values.dim() > 2:
            values = values[0]
        corner = values[..., :SAMPLED, :SAMPLED] if values.dim() == 2 else values[:SAMPLED]
        sample = corner.flatten().float().sort().values.cpu()
        parts.append(repr(sorted(parameter.shape)).encode() + sample.numpy().tobytes())
    digest = hashlib.sha256(b"\0".join(sorted(parts))).hexdigest()[:16]
    return f"{FINGERPRINT_VERSION}:{model.config.model_type}:{digest}"


def is_of_model(
    recorded: str | None, adapter: VLMAdapter, source: str, num_blocks: int | None = None, topk: int | None = None
) -> bool:
    """Whether something was measured on, or trained for, an adapter's model; True where nothing is recorded.

    The fingerprints of earlier versions were taken of a configuration that transformers 5 writes differently, so they
    cannot be compared: with one of those, True and a warning if the numbers fit.

    Args:
        recorded: the fingerprint.
        adapter: of the model.
        source: of the fingerprint, for the warning.
        num_blocks: that are recorded beside it; None where none are.
        topk: how many experts a token was routed to, 0 for none, as recorded beside it; None where it is not.
    """
    if recorded is None:
        return True
    if not OLD_FINGERPRINT.fullmatch(recorded):
        return recorded == fingerprint(adapter.model)
    fits = num_blocks in (None, len(adapter.blocks)) and topk in (None, adapter.trained_topk)
    if fits:
        _warn_of_old_fingerprint(source)
    return fits


@lru_cache
def _warn_of_old_fingerprint(source: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print_line(
            f"warning: {source} was written by an earlier version, whose fingerprint of the model cannot be compared "
            "any more; no other number of blocks or experts shows, so it is taken for this model's",
            sys.stderr,
        )
