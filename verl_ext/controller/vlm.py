"""Loads a vision-language model and identifies its weights; loads the controllers that were trained for it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from verl_ext.console import warn
from verl_ext.controller.adapters import VLMAdapter, adapter_for
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.network import BudgetController
from verl_ext.errors import UserError, first_line_of
from verl_ext.model_files import load_whole, require_no_remote_code
from verl_ext.plugins import Plugin

FINGERPRINT_VERSION = 2
FIRST_FINGERPRINT = re.compile("[0-9a-f]{16}")
"""Fingerprints of version 1."""
NUM_HASHED = 4
"""Values in each of a tensor's last two dimensions that a fingerprint covers."""
STATE_KEY = "one_stage_controller_state_dict"
"""Key of the weights in a controller's `.pt` file."""


def default_device() -> tuple[str, torch.dtype]:
    """Device and precision of a model unless configured: a GPU in bfloat16 if there is one."""
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
    """Load a frozen model and return its adapter.

    Args:
        path: a directory, or a name on the hub.
        tier_sizes: see `VLMAdapter`.
        trust_remote_code: whether to run the code of the checkpoint, which Molmo needs.
        own_adapter: see `adapter_for`.

    Raises:
        UserError: the model cannot be loaded, or there is no adapter for it.
    """
    name = str(Path(path).expanduser())
    require_no_remote_code(name, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        brings_code = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
        loader = AutoModelForCausalLM if brings_code else AutoModelForImageTextToText
        model = load_whole(loader, name, dtype=dtype, trust_remote_code=trust_remote_code)
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # a damaged model can raise anything
        raise UserError(
            f"the vision-language model {path} cannot be loaded ({first_line_of(error)}); give the directory of one, "
            "or set trust_remote_code for a model with its own code"
        ) from error
    return adapter_for(model.to(device).eval().requires_grad_(False), processor, tier_sizes, own_adapter)


# Fingerprints


def fingerprint(model: PreTrainedModel) -> str:
    """A short identifier of a model's type and weights, which ties measurements to the model they were made on.

    It is `VERSION:model_type:digest`. The digest covers the shape of each parameter and its first values, up to
    `NUM_HASHED` in each of the last two dimensions. It ignores the names and the order of the parameters and the
    orientation of matrices, which change with releases of transformers, but depends on the precision.
    """
    parts = []
    for parameter in model.parameters():
        values = parameter.detach()
        while values.dim() > 2:
            values = values[0]
        corner = values[..., :NUM_HASHED, :NUM_HASHED] if values.dim() == 2 else values[:NUM_HASHED]
        sample = corner.flatten().float().sort().values.cpu()
        parts.append(repr(sorted(parameter.shape)).encode() + sample.numpy().tobytes())
    digest = hashlib.sha256(b"\0".join(sorted(parts))).hexdigest()[:16]
    return f"{FINGERPRINT_VERSION}:{model.config.model_type}:{digest}"


def matches_fingerprint(
    recorded: str | None, adapter: VLMAdapter, source: str, num_blocks: int | None = None, topk: int | None = None
) -> bool:
    """Whether a recorded fingerprint is that of an adapter's model; True if there is none.

    Fingerprints of version 1 depend on the release of transformers that wrote them, so they cannot be compared: one of
    them matches, with a warning, if the recorded numbers do.

    Args:
        source: where it was recorded, for the warning.
        num_blocks: recorded number of blocks; None if unknown.
        topk: recorded number of experts per token, 0 for a model without; None if unknown.
    """
    if recorded is None:
        return True
    if not FIRST_FINGERPRINT.fullmatch(recorded):
        return recorded == fingerprint(adapter.model)
    matches = num_blocks in (None, len(adapter.blocks)) and topk in (None, adapter.trained_topk)
    if matches:
        _warn_of_first_fingerprint(source)
    return matches


@lru_cache
def _warn_of_first_fingerprint(source: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        warn(
            f"{source} was written by an earlier version, whose fingerprint of the model can no longer be compared; "
            "it is assumed to belong to this model, because the numbers of blocks and experts match"
        )


# Controllers


@dataclass(frozen=True)
class ControlledModel:
    """The vision-language model that a controller was trained for, and how to ask it; stored in the export.

    Attributes:
        path: directory or hub name.
        tier_sizes: see `VLMAdapter`.
        question_suffix: appended to every question.
        trust_remote_code: whether the model has its own code.
        fingerprint: of its weights; None before it was loaded.
        num_threads: of torch on the CPU, on which latencies depend; None for torch's default.
        adapter: the user's adapter, as `model.adapter` named it; None if the model's type determines it.
        num_blocks: blocks of the model; None if unknown.
        topk: experts per token of the released model, 0 for a model without; None if unknown.
    """

    path: str
    tier_sizes: tuple[int, ...]
    max_new_tokens: int
    question_suffix: str = ""
    trust_remote_code: bool = False
    fingerprint: str | None = None
    num_threads: int | None = None
    adapter: str | None = None
    num_blocks: int | None = None
    topk: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tier_sizes": list(self.tier_sizes)}

    def runner(self, device: str, dtype: torch.dtype, own_adapter: Plugin | None = None, **sizes: int) -> VLMRunner:
        """Load the model, to be asked as in training; on the CPU, also set torch's number of threads, if known.

        Args:
            own_adapter: see `adapter_for`. That an export names an adapter is not enough to run its code.
            sizes: of the runner's caches.

        Raises:
            UserError: the model cannot be loaded, or is not the one that the controller was trained for.
        """
        if self.adapter is not None and own_adapter is None:
            raise UserError(
                f"the controller was trained with the adapter {self.adapter}; name it (--adapter {self.adapter}) to "
                "run its code"
            )
        if device == "cpu" and self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        adapter = load_adapter(
            self.path,
            self.tier_sizes,
            device=device,
            dtype=dtype,
            trust_remote_code=self.trust_remote_code,
            own_adapter=own_adapter,
        )
        if not matches_fingerprint(self.fingerprint, adapter, "the controller's export", self.num_blocks, self.topk):
            raise UserError(f"the controller was trained for another model than {self.path}; give that model")
        return VLMRunner(adapter, self.max_new_tokens, **sizes)


def load_controller(
    directory: Path, vlm: str | None = None, trust_remote_code: bool = False
) -> tuple[BudgetController, ControlledModel]:
    """Load an exported controller in evaluation mode, with the model that it was trained for.

    Args:
        directory: an export, with `config.json`.
        vlm: path of the vision-language model; None for its path in training.
        trust_remote_code: whether the model's own code may run. What the export says about that does not count, since
            the export also names the model.

    Raises:
        UserError: the directory is not a controller's export.
    """
    try:
        controller = BudgetController.from_pretrained(directory, dtype=torch.float32).eval()
        recorded, space = controller.config.vlm, controller.space
        known: dict[str, Any] = {"path": vlm or recorded["path"], "trust_remote_code": trust_remote_code}
        known |= {"tier_sizes": tuple(recorded["tier_sizes"]), "num_blocks": space.num_blocks, "topk": space.full_topk}
        return controller, ControlledModel(**{**recorded, **known})
    except Exception as error:  # a damaged export can raise anything
        raise UserError(
            f"{directory} is not the export of a budget controller ({first_line_of(error)}); give the huggingface "
            "folder of a checkpoint of stage budget"
        ) from error


def load_weights(controller: BudgetController, path: Path) -> None:
    """Load the weights of an export or of a `best_model.pt` into a controller of the same size.

    Raises:
        UserError: the file is missing, or of a controller of another size.
    """
    try:
        if path.is_dir():
            weights = BudgetController.from_pretrained(path).state_dict()
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)[STATE_KEY]
        controller.load_state_dict(weights)
    except Exception as error:  # a damaged file can raise anything
        raise UserError(
            f"controller.init_from={path} is not a controller of this size ({first_line_of(error)}); give a "
            "best_model.pt that was trained for this model with these settings"
        ) from error
