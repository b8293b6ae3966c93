"""Adapters for the vision-language models that a controller can run partially, and the base class of adapters.

A custom adapter needs `VLMAdapter`, `SkippedBlock`, `DecodeState` and `Inputs` from this package.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, ProcessorMixin

from verl_ext.controller.adapters.base import DecodeState, Inputs, SkippedBlock, VLMAdapter, setting_name
from verl_ext.controller.adapters.molmo import MolmoAdapter
from verl_ext.controller.adapters.qwen_vl import Qwen35Adapter, QwenVLAdapter
from verl_ext.errors import UserError
from verl_ext.plugins import Plugin

__all__ = ["ADAPTERS", "DecodeState", "Inputs", "SkippedBlock", "VLMAdapter", "adapter_for"]

ADAPTERS: dict[str, type[VLMAdapter]] = {
    "qwen2_5_vl": QwenVLAdapter,
    "qwen3_vl": QwenVLAdapter,
    "qwen3_vl_moe": QwenVLAdapter,
    "qwen3_5": Qwen35Adapter,
    "qwen3_5_moe": Qwen35Adapter,
    "molmo": MolmoAdapter,
}
"""Adapters by `model_type`."""


def adapter_for(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    tier_sizes: Sequence[int],
    plugin: Plugin | None = None,
    section: str | None = "controller",
) -> VLMAdapter:
    """Create the adapter for a model's `model_type`, or a custom adapter.

    Args:
        plugin: a custom adapter class, for any other architecture.
        section: see `setting_name`.

    Raises:
        UserError: no adapter supports the model, the custom class cannot be used, or the tiers do not fit the model.
    """
    model_type = model.config.model_type
    if plugin is None and model_type not in ADAPTERS:
        raise UserError(
            f"the controller cannot run a model of type {model_type}; use one of {', '.join(ADAPTERS)}, or specify an "
            "adapter"
        )
    adapter_class = ADAPTERS[model_type] if plugin is None else load_adapter_class(plugin)
    adapter = adapter_class(model, processor, tier_sizes)
    adapter.check_tiers(setting_name(section, "tier_sizes"))
    return adapter


def load_adapter_class(plugin: Plugin) -> type[VLMAdapter]:
    """Load a custom adapter class.

    Raises:
        UserError: the class cannot be loaded, is not a `VLMAdapter`, or lacks a method.
    """
    loaded = plugin.load()
    if not isinstance(loaded, type) or not issubclass(loaded, VLMAdapter):
        raise UserError(f"{plugin.key} names {plugin}, which is not a VLMAdapter; derive it from that class")
    if missing := sorted(loaded.__abstractmethods__):
        raise UserError(f"{plugin.key} names {plugin}, which lacks {', '.join(missing)}; define them")
    return loaded
