"""Idefics3 and the first SmolVLM in transformers: a tier is the longest edge of the scaled image.

An image that is larger than the vision encoder's input is split into crops, followed by a scaled copy of the whole
image.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import nn

from verl_ext.controller.adapters import DecodeState, Inputs, SkippedBlock, VLMAdapter


class Idefics3Adapter(VLMAdapter):
    """SigLIP and a dense language model (Llama)."""

    unit = "pixels of the longest edge"

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.model.text_model.layers

    @property
    def vision_site(self) -> tuple[nn.Module, str]:
        return self.model.model, "vision_model"

    def skipped_block(self, index: int) -> SkippedBlock:
        """A block returns only its hidden states."""
        return SkippedBlock(lambda hidden_states: hidden_states)

    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        size = {"longest_edge": self.tier_sizes[tier]}
        inputs = self.processor(images=[image], text=[text], images_kwargs={"size": size}, return_tensors="pt")
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def num_patches(self, inputs: Inputs) -> int:
        """Pixel values are (1, crops, channels, height, width)."""
        _, crops, _, height, width = inputs["pixel_values"].shape
        return crops * (height // self._patch) * (width // self._patch)

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Any:
        """A patch is processed if it contains a pixel of the image."""
        pixels = inputs["pixel_values"][0].to(self.vision_encoder.dtype)
        mask = inputs["pixel_attention_mask"][0].unfold(1, self._patch, self._patch).unfold(2, self._patch, self._patch)
        return self.vision_encoder(pixel_values=pixels, patch_attention_mask=mask.sum((-1, -2)) > 0)

    def pooled_vision(self, encoding: Any) -> torch.Tensor:
        """The global crop is the last; features are (crops, patches, width)."""
        return encoding.last_hidden_state[-1].mean(0)

    def prefill(self, inputs: Inputs) -> DecodeState:
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        return DecodeState(output.logits[:, -1], output.past_key_values, inputs["input_ids"].shape[1])

    def decode(self, state: DecodeState, token: torch.Tensor) -> DecodeState:
        output = self.model(input_ids=token, past_key_values=state.cache, use_cache=True, logits_to_keep=1)
        return DecodeState(output.logits[:, -1], output.past_key_values, state.length + 1)

    @property
    def _patch(self) -> int:
        return self.model.config.vision_config.patch_size
