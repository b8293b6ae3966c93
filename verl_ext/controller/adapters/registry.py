"""Which adapter a model takes."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel, ProcessorMixin

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.adapters.molmo import MolmoAdapter
from verl_ext.controller.adapters.qwen_vl import Qwen3VLAdapter, Qwen25VLAdapter
from verl_ext.errors import UserError

ADAPTERS: dict[str, type[VLMAdapter]] = {
    "qwen2_5_vl": Qwen25VLAdapter,
    "qwen3_vl": Qwen3VLAdapter,
    "qwen3_vl_moe": Qwen3VLAdapter,
    "molmo": MolmoAdapter,
}


def adapter_of(model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int]) -> VLMAdapter:
    """The adapter for a model by its `config.model_type`; the arguments are those of `VLMAdapter`.

    Raises:
        UserError: there is none for its architecture.
    """
    kind = model.config.model_type
    if kind not in ADAPTERS:
        raise UserError(f"the controller cannot run a model of type {kind}; it knows {', '.join(ADAPTERS)}")
    return ADAPTERS[kind](model, processor, tier_sizes)
