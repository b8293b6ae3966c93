"""Molmo and MolmoE with the code in their checkpoints. A tier is a number of crops in addition to the global crop.

No package carries that code, so tests use a stand-in with the names and signatures of the published `modeling_molmo.py`
and `modeling_molmoe.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import nn

from verl_ext.controller.adapters.base import DecodeState, Inputs, SkippedBlock, VLMAdapter


class MolmoAdapter(VLMAdapter):
    """`tier_sizes` are `max_crops` of the processor."""

    unit = "crops"

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.model.transformer.blocks

    @property
    def vision_site(self) -> tuple[nn.Module, str]:
        return self.model.model, "vision_backbone"

    def skipped_block(self, index: int) -> SkippedBlock:
        """The model expects a cache from each block, so a skipped block returns an empty one."""
        return SkippedBlock(lambda hidden_states: (hidden_states, ()))

    def router(self, mixture: Any) -> Any:
        """A mixture does its own routing."""
        return mixture

    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        inputs = self.processor.process(
            images=[image], text=question, images_kwargs={"max_crops": self.tier_sizes[tier]}
        )
        inputs["images"] = inputs["images"].to(self.model.dtype)  # the model does not cast them
        return {name: tensor.unsqueeze(0).to(self.model.device) for name, tensor in inputs.items()}

    def num_patches(self, inputs: Inputs) -> int:
        """Images are (1, crops, patches, pixels)."""
        return inputs["images"].shape[1] * inputs["images"].shape[2]

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Any:
        return self.vision_encoder(inputs["images"], inputs.get("image_masks"))

    def pooled_vision(self, encoding: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        """The global crop is the first; features are (1, crops, patches, width)."""
        return encoding[0][0, 0].mean(0)

    def prefill(self, inputs: Inputs) -> DecodeState:
        output = self.model(**inputs, use_cache=True, last_logits_only=True)
        return DecodeState(output.logits[:, -1], output.past_key_values, inputs["input_ids"].shape[1])

    def decode(self, state: DecodeState, token: torch.Tensor) -> DecodeState:
        length = state.length
        output = self.model(
            input_ids=token,
            attention_mask=torch.ones(1, length + 1, dtype=torch.long, device=token.device),
            position_ids=torch.full((1, 1), length, device=token.device),
            past_key_values=state.cache,
            use_cache=True,
            last_logits_only=True,
        )
        return DecodeState(output.logits[:, -1], output.past_key_values, length + 1)
