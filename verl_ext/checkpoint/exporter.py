"""What a run's checkpoints hold for Hugging Face, from one save to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_ext.checkpoint.companions import companion_files
from verl_ext.checkpoint.export import layout_of
from verl_ext.checkpoint.layout import EXPORT
from verl_ext.checkpoint.options import SaveOptions
from verl_ext.checkpoint.safetensors_layout import INDEX, SafetensorsLayout
from verl_ext.checkpoint.shards import whole
from verl_ext.checkpoint.weights import PLAN, Weight, exported_weights, plan_to_json
from verl_ext.distributed import on_every_rank, on_rank_zero
from verl_ext.errors import UserError


@dataclass
class Export:
    """What `huggingface/` gets besides the configuration and the tokenizer.

    Attributes:
        weights: the tensors.
        layout: where they lie.
        factors: whole A and B of every LoRA adapter.
    """

    weights: list[Weight]
    layout: SafetensorsLayout
    factors: dict[str, torch.Tensor]


class Exporter:
    """Decides at each save what is exported; made by all ranks together.

    Args:
        model: sharded with FSDP2.
        tokenizer: with its chat template.
        options: how this run saves.
        exports_weights: whether `huggingface/` has weights at all.
        is_writer: true on rank 0, which writes the small files.

    Raises:
        UserError: it exports weights with adapters that cannot be merged.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        options: SaveOptions,
        exports_weights: bool,
        is_writer: bool,
    ) -> None:
        self.options, self.exports_weights = options, exports_weights
        self.weights = on_rank_zero(lambda: self._exportable(model))
        self.companions: dict[str, bytes] = on_every_rank(
            lambda: companion_files(model, tokenizer, options.export_dtype) if is_writer else {}
        )

    def _exportable(self, model: PreTrainedModel | PeftModel) -> list[Weight]:
        """What an export holds; also known without one, for the plan with which the command makes it later."""
        try:
            return exported_weights(model)
        except UserError:
            if self.exports_weights:
                raise
            return []

    def at(self, step: int, state: Mapping[str, torch.Tensor]) -> Export | None:
        """What is exported at this step, None when nothing is; gathers the LoRA factors, so collective.

        Args:
            step: of the save.
            state: this rank's state of the model.
        """
        if not self.exports_weights or not self.options.exports_at(step):
            return None
        adapters = [weight.adapter for weight in self.weights if weight.adapter is not None]
        names = {name for adapter in adapters for name in (adapter.down, adapter.up)}
        factors = {name: whole(state[name]).cpu().clone() for name in sorted(names)}
        layout = layout_of(self.weights, state, self.options.export_dtype, self.options.max_shard_gib)
        return Export(self.weights, layout, factors)

    def small_files(self, export: Export | None) -> dict[str, Any]:
        """Content by path relative to the checkpoint of all but the weights."""
        files: dict[str, Any] = dict(self.companions)
        if self.weights:
            files[PLAN] = plan_to_json(self.weights).encode()
        if export is not None and export.layout.index is not None:
            files[f"{EXPORT}/{INDEX}"] = export.layout.index
        return files
