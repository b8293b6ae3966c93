"""Molmo and MolmoE by the code that their checkpoints bring: tiers are crops of the image beside the global one.

That code cannot be had without the hub, so this module is tested on a stand-in that has the names and signatures of
the published `modeling_molmo.py` and `modeling_molmoe.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import nn

from verl_ext.controller.adapters.base import Decoding, Inputs, VLMAdapter
from verl_ext.controller.adapters.swap import Skipped


class MolmoAdapter(VLMAdapter):
    """`tier_sizes` are `max_crops` of the processor."""

    unit = "crops"

    @property
    def blocks(self) -> nn.ModuleList:
        """See `VLMAdapter`."""
        return self.model.model.transformer.blocks

    @property
    def vision_site(self) -> tuple[nn.Module, str]:
        """See `VLMAdapter`."""
        return self.model.model, "vision_backbone"

    def skip(self, index: int) -> Skipped:
        """See `VLMAdapter`; the model insists on a cache of each block, so that of a skipped one is empty."""
        return Skipped(lambda hidden_states: (hidden_states, ()))

    def router(self, mixture: Any) -> Any:
        """See `VLMAdapter`; the mixture routes its tokens itself."""
        return mixture

    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        """See `VLMAdapter`."""
        found = self.processor.process(
            images=[image], text=question, images_kwargs={"max_crops": self.tier_sizes[tier]}
        )
        return {name: tensor.unsqueeze(0).to(self.model.device) for name, tensor in found.items()}

    def num_patches(self, inputs: Inputs) -> int:
        """See `VLMAdapter`; images are (1, crops, patches, pixels)."""
        return inputs["images"].shape[1] * inputs["images"].shape[2]

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Any:
        """See `VLMAdapter`."""
        return self.vision_encoder(inputs["images"], inputs.get("image_masks"))

    def pooled_vision(self, encoding: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
        """See `VLMAdapter`; the global crop is the first, features are (1, crops, patches, width)."""
        return encoding[0][0, 0].mean(0)

    def begin(self, inputs: Inputs) -> Decoding:
        """See `VLMAdapter`."""
        found = self.model(**inputs, use_cache=True, last_logits_only=True)
        return Decoding(found.logits[:, -1], found.past_key_values, inputs["input_ids"].shape[1])

    def go_on(self, decoding: Decoding, token: torch.Tensor) -> Decoding:
        """See `VLMAdapter`."""
        length = decoding.length
        found = self.model(
            input_ids=token,
            attention_mask=torch.ones(1, length + 1, dtype=torch.long, device=token.device),
            position_ids=torch.full((1, 1), length, device=token.device),
            past_key_values=decoding.cache,
            use_cache=True,
            last_logits_only=True,
        )
        return Decoding(found.logits[:, -1], found.past_key_values, length + 1)
