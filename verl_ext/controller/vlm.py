"""Loads vision-language models and their controllers, and identifies the models' weights."""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, get_args

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from verl_ext.console import warn
from verl_ext.controller.adapters import ADAPTERS, VLMAdapter, adapter_for
from verl_ext.controller.config import VLMPrecision, require_ascending
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.source import find_controller
from verl_ext.errors import UserError, first_line_of
from verl_ext.hardware import disable_cudnn_attention, pick_precision
from verl_ext.model_files import (
    CONTROLLER_TYPE,
    config_of,
    is_hub_name,
    load_pretrained_strict,
    read_json,
    require_no_controller,
    require_no_remote_code,
)
from verl_ext.plugins import Plugin

FINGERPRINT_VERSION = 2
NUM_HASHED = 4
"""Number of values that a fingerprint covers in each of a tensor's last two dimensions."""
SAME_BUDGETS = 0.05
"""Relative difference up to which budgets count as equal; `budgets_of_full` vary with each fit of a latency model."""
STATE_KEY = "one_stage_controller_state_dict"
"""Key of the weights in a controller's `.pt` file."""
PRECISIONS = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Values of `controller.dtype` and `--dtype` by dtype."""


def default_device(dtype: str = "auto") -> tuple[str, torch.dtype]:
    """Default device of a model, a GPU if there is one, and the dtype there; `dtype` is as in `controller.dtype`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return device, pick_precision(dtype, device)


def precision_of(adapter: VLMAdapter) -> str:
    """The model's dtype as a value of `controller.dtype` and `--dtype`."""
    return PRECISIONS[adapter.model.dtype]


def load_adapter(
    path: str,
    tier_sizes: Sequence[int],
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    custom_adapter: Plugin | None = None,
    section: str | None = "controller",
) -> VLMAdapter:
    """Load a frozen model and return its adapter.

    Args:
        path: a directory, or a name on the Hub.
        tier_sizes: see `VLMAdapter`.
        trust_remote_code: whether to run the code of the checkpoint, which Molmo needs.
        custom_adapter: see `adapter_for`, also for `section`.

    Raises:
        UserError: the model cannot be loaded, or there is no adapter for it.
    """
    name = str(Path(path).expanduser())
    require_no_remote_code(name, trust_remote_code)
    require_no_controller(path, config_of(name))
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        custom_class = getattr(config, "auto_map", {}).get("AutoModelForCausalLM")
        if custom_class is None and custom_adapter is None and getattr(config, "vision_config", None) is None:
            raise UserError(f"{path} is a {config.model_type} model without vision; use one of {', '.join(ADAPTERS)}")
        if custom_class is None:
            model = load_pretrained_strict(
                AutoModelForImageTextToText, name, dtype=dtype, trust_remote_code=trust_remote_code
            )
        else:
            model_class = get_class_from_dynamic_module(custom_class, name)
            adapt_model_class(model_class)
            model = load_pretrained_strict(model_class, name, config=config, dtype=dtype)
        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except UserError:
        raise
    except Exception as error:  # a damaged model can raise anything
        raise UserError(
            f"the vision-language model {path} cannot be loaded ({first_line_of(error)}); specify a model's directory, "
            "or set trust_remote_code for a model with custom code"
        ) from error
    disable_cudnn_attention()  # as in training, so that latencies agree
    return adapter_for(model.to(device).eval().requires_grad_(False), processor, tier_sizes, custom_adapter, section)


def adapt_model_class(model_class: type[PreTrainedModel]) -> None:
    """Let a checkpoint's own model class, written for transformers 4 as Molmo's is, load in transformers 5.

    - transformers 5.0 reads `all_tied_weights_keys`, which is missing if the class does not call `post_init`.
    - transformers 5.0 passes keywords to `tie_weights`, which the class may define without them.
    """
    if not hasattr(model_class, "all_tied_weights_keys"):
        model_class.all_tied_weights_keys = {}
    tie_weights = model_class.tie_weights
    if not inspect.signature(tie_weights).parameters.keys() & {"missing_keys", "kwargs"}:
        model_class.tie_weights = lambda model, **_: tie_weights(model)


# Fingerprints


def fingerprint(model: PreTrainedModel) -> str:
    """A short identifier of a model's type and weights, which links measurements to their model.

    The format is `VERSION:model_type:digest`. The digest covers the shape and the first values of each parameter, up to
    `NUM_HASHED` in each of the last two dimensions. It ignores the names and the order of the parameters and the
    orientation of matrices, which change between releases of transformers, but it depends on the dtype.
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


def matches_fingerprint(recorded: str | None, adapter: VLMAdapter) -> bool:
    """Whether a recorded fingerprint matches an adapter's model; True without a recorded fingerprint."""
    return recorded is None or recorded == fingerprint(adapter.model)


# Controllers

_CONTROLLED_TYPES: dict[str, tuple[type, ...]] = {
    **{"path": (str,), "max_new_tokens": (int,), "question_suffix": (str,), "trust_remote_code": (bool,)},
    **{"fingerprint": (str, NoneType), "num_threads": (int, NoneType), "adapter": (str, NoneType)},
}


@dataclass(frozen=True)
class ControlledModel:
    """The vision-language model that a controller was trained for, with its settings; stored in the export.

    Attributes:
        path: directory or Hub name.
        tier_sizes: see `VLMAdapter`.
        question_suffix: text appended to every question.
        trust_remote_code: whether the model has custom code.
        fingerprint: fingerprint of the weights; None before the model was loaded.
        num_threads: torch's number of threads on the CPU, which affects latencies; None for torch's default.
        adapter: custom adapter from `model.adapter`; None if the model's type determines the adapter.
        dtype: dtype in training, as in `controller.dtype`; `auto` in exports of earlier versions.
    """

    path: str
    tier_sizes: tuple[int, ...]
    max_new_tokens: int
    question_suffix: str = ""
    trust_remote_code: bool = False
    fingerprint: str | None = None
    num_threads: int | None = None
    adapter: str | None = None
    dtype: str = "auto"

    def __post_init__(self) -> None:
        """Check values that may come from a file.

        Raises:
            UserError: a number is below 1, or the tiers are not ascending.
            TypeError: a value has another type.
        """
        for name, kinds in _CONTROLLED_TYPES.items():
            if type(getattr(self, name)) not in kinds:  # not isinstance, because a bool is no number
                raise TypeError(f"its {name} is {getattr(self, name)!r}")
        if self.dtype not in get_args(VLMPrecision):
            raise TypeError(f"its dtype is {self.dtype!r}")
        if not all(type(size) is int for size in self.tier_sizes):
            raise TypeError(f"its tier_sizes are {list(self.tier_sizes)}")
        require_ascending("tier_sizes", self.tier_sizes)
        if self.max_new_tokens < 1 or (self.num_threads or 1) < 1:
            raise UserError("max_new_tokens and num_threads must be at least 1")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tier_sizes": list(self.tier_sizes)}

    def runner(
        self, device: str, dtype: torch.dtype, custom_adapter: Plugin | None = None, **options: Any
    ) -> VLMRunner:
        """Load the model with the settings of training; on the CPU, also set torch's number of threads, if known.

        Args:
            custom_adapter: see `adapter_for`. An adapter that only the export names is not run.
            options: further arguments of `VLMRunner`.

        Raises:
            UserError: the model cannot be loaded, or the controller was trained for another model.
        """
        if self.adapter is not None and custom_adapter is None:
            raise UserError(
                f"the controller was trained with the adapter {self.adapter}; pass --adapter {self.adapter} to load it"
            )
        if device == "cpu" and self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        adapter = load_adapter(
            self.path,
            self.tier_sizes,
            device=device,
            dtype=dtype,
            trust_remote_code=self.trust_remote_code,
            custom_adapter=custom_adapter,
        )
        if not matches_fingerprint(self.fingerprint, adapter):
            raise UserError(
                f"the controller was trained for a model other than {self.path}; pass the path of its model with --vlm"
            )
        return VLMRunner(adapter, self.max_new_tokens, **options)


def load_controller(
    directory: Path, vlm: str | None = None, trust_remote_code: bool = False
) -> tuple[BudgetController, ControlledModel]:
    """Load an exported controller in evaluation mode, with a description of the model that it was trained for.

    Args:
        directory: an export, with `config.json`.
        vlm: path of the vision-language model; None for its path in training.
        trust_remote_code: whether the model's custom code may run. The export's own setting is ignored, because the
            export also names the model.

    Raises:
        UserError: the directory is not a controller's export or is damaged, or the model has moved.
    """
    try:
        controller = read_export(directory).eval()
        names = {each.name for each in fields(ControlledModel)}  # another release may have written further ones
        recorded = {name: value for name, value in controller.config.vlm.items() if name in names}
        known: dict[str, Any] = {"path": vlm or recorded["path"], "trust_remote_code": trust_remote_code}
        controlled = ControlledModel(**{**recorded, **known, "tier_sizes": tuple(recorded["tier_sizes"])})
        if len(controlled.tier_sizes) != len(controller.space.tiers):
            raise ValueError(f"it has {len(controller.space.tiers)} tiers, but {len(controlled.tier_sizes)} tier_sizes")
    except Exception as error:  # a damaged export can raise anything
        raise UserError(
            f"{directory} is not an export of a budget controller ({first_line_of(error)}); specify the huggingface "
            "folder of a checkpoint of the stage budget"
        ) from error
    if vlm is None and not is_hub_name(controlled.path) and not Path(controlled.path).expanduser().is_dir():
        raise UserError(
            f"{directory} was trained for the vision-language model {controlled.path}, which does not exist; set --vlm "
            "to its new path"
        )
    return controller, controlled


def read_export(directory: Path) -> BudgetController:
    """Load an exported controller in float32.

    Raises:
        UserError: the export is not a controller's, or lacks weights, or has weights that are not finite.
        Exception: the export is damaged in another way.
    """
    if read_json(directory / "config.json").get("model_type") != CONTROLLER_TYPE:
        raise UserError(f"the model_type in its config.json is not {CONTROLLER_TYPE}")
    controller: BudgetController = load_pretrained_strict(BudgetController, str(directory), dtype=torch.float32)
    require_finite(controller.state_dict())
    return controller


def require_finite(weights: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not finite, as in a damaged file.

    Raises:
        UserError: the message names the first such tensor.
    """
    for name, tensor in weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"its {name} is not finite")


def load_weights(controller: BudgetController, path: Path) -> None:
    """Load the weights of an export or a `best_model.pt` into a controller of the same size.

    Warns if they were trained for another vision-language model or for other budgets.

    Args:
        path: a `best_model.pt` or `checkpoint_epoch_N.pt`, or a directory that `find_controller` accepts.

    Raises:
        UserError: the path holds no controller, a damaged one, or one of another size.
    """
    key = f"controller.init_from={path}"
    try:
        export = find_controller(path).export if path.is_dir() else None
    except UserError as error:
        raise UserError(f"{key} cannot be used: {error}") from error
    try:
        if export is not None:
            source = read_export(export)
            weights, config = source.state_dict(), source.config.to_dict()
        else:
            weights, config = _read_weights_file(path)
    except Exception as error:  # a damaged file can raise anything
        why = str(error) if isinstance(error, UserError) else "it is damaged, or another kind of file"
        raise UserError(
            f"{key} is not a budget controller ({why}); specify a best_model.pt, an export or the directory of a run "
            "of the stage budget"
        ) from error
    for name, tensor in controller.state_dict().items():
        if name not in weights or weights[name].shape != tensor.shape:
            expected, found = tuple(tensor.shape), tuple(weights[name].shape) if name in weights else None
            has = f"lacks {name}" if found is None else f"has the shape {found} instead of {expected} in {name}"
            raise UserError(
                f"{key} is not a controller of this size (it {has}); specify one that was trained for a model of this "
                "size with these settings"
            )
    controller.load_state_dict({name: weights[name] for name in controller.state_dict()})
    differences = training_differences(controller.config, config)
    if differences and os.environ.get("RANK", "0") == "0":
        warn(f"{key} was trained for {' and '.join(differences)}")


def _read_weights_file(path: Path) -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
    """Read weights and configuration of a controller's `.pt` file.

    Raises:
        UserError: the file has no controller, or weights that are not finite.
        Exception: the file cannot be read.
    """
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, Mapping) or not isinstance(content.get(STATE_KEY), Mapping):
        raise UserError(f"it has no {STATE_KEY}")
    weights, config = content[STATE_KEY], content.get("config", {})
    require_finite(weights)
    return weights, config


def training_differences(config: BudgetControllerConfig, other: Mapping[str, Any]) -> list[str]:
    """What else another controller was trained for: its vision-language model and budgets, where they differ.

    Args:
        other: configuration of the other controller as plain values; missing keys count as equal.
    """
    differences, vlm = [], other.get("vlm") or {}
    recorded = vlm.get("fingerprint")
    if recorded is not None and recorded != config.vlm.get("fingerprint"):
        differences.append(f"another vision-language model or dtype ({vlm.get('path')})")
    low_ms, high_ms = other.get("low_ms", config.low_ms), other.get("high_ms", config.high_ms)
    pairs = (low_ms, config.low_ms), (high_ms, config.high_ms)
    if not all(math.isclose(*pair, rel_tol=SAME_BUDGETS) for pair in pairs):
        differences.append(
            f"budgets from {low_ms:.1f} to {high_ms:.1f} ms instead of {config.low_ms:.1f} to {config.high_ms:.1f} ms"
        )
    return differences
