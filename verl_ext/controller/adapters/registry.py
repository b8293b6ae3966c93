"""Which adapter a model takes."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, ProcessorMixin

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.adapters.molmo import MolmoAdapter
from verl_ext.controller.adapters.qwen_vl import Qwen35Adapter, QwenVLAdapter
from verl_ext.errors import UserError
from verl_ext.plugins import Plugin

ADAPTERS: dict[str, type[VLMAdapter]] = {
    "qwen2_5_vl": QwenVLAdapter,
    "qwen3_vl": QwenVLAdapter,
    "qwen3_vl_moe": QwenVLAdapter,
    "qwen3_5": Qwen35Adapter,
    "qwen3_5_moe": Qwen35Adapter,
    "molmo": MolmoAdapter,
}


def adapter_of(
    model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int], plugin: Plugin | None = None
) -> VLMAdapter:
    """The adapter for a model by its `config.model_type`, or one of the user's own.

    Args:
        model: see `VLMAdapter`.
        processor: see `VLMAdapter`.
        tier_sizes: see `VLMAdapter`.
        plugin: a class of the user's, for an architecture that is not known here.

    Raises:
        UserError: there is none for its architecture, or the user's is none.
    """
    kind = model.config.model_type
    if plugin is not None:
        return own_adapter(plugin)(model, processor, tier_sizes)
    if kind not in ADAPTERS:
        known = ", ".join(ADAPTERS)
        raise UserError(f"the controller cannot run a model of type {kind}; it knows {known}, or name an adapter")
    return ADAPTERS[kind](model, processor, tier_sizes)


def own_adapter(plugin: Plugin) -> type[VLMAdapter]:
    """The user's class.

    Raises:
        UserError: it cannot be loaded, is no `VLMAdapter`, or lacks something of one.
    """
    found = plugin.load()
    if not isinstance(found, type) or not issubclass(found, VLMAdapter):
        raise UserError(f"{plugin.key} names {plugin}, which is not a VLMAdapter; derive it from that")
    if missing := sorted(found.__abstractmethods__):
        raise UserError(f"{plugin.key} names {plugin}, which lacks {', '.join(missing)}; define them")
    return found
