"""Qwen2.5-VL, Qwen3-VL and Qwen3-VL-MoE as transformers has them: tiers are pixels of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import PreTrainedModel, ProcessorMixin

from verl_ext.controller.adapters.base import Decoding, Inputs, VLMAdapter
from verl_ext.controller.adapters.routed_experts import RoutedExperts
from verl_ext.controller.adapters.swap import Skipped
from verl_ext.errors import UserError
from verl_ext.rendering import rendering


class QwenVLAdapter(VLMAdapter):
    """What the family has in common; `tier_sizes` are the most pixels that an image is scaled to."""

    unit = "pixels"

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int]) -> None:
        """See `VLMAdapter`.

        Raises:
            UserError: its blocks do not all attend alike, and the cache's length is asked of one that may be skipped.
        """
        super().__init__(model, processor, tier_sizes)
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if len(kinds) > 1:
            raise UserError(
                f"{type(model).__name__} with blocks of {' and '.join(sorted(map(str, kinds)))} cannot skip any; "
                "set use_sliding_window to false in its config.json"
            )

    @property
    def blocks(self) -> nn.ModuleList:
        """See `VLMAdapter`."""
        return self.model.model.language_model.layers

    @property
    def vision_site(self) -> tuple[nn.Module, str]:
        """See `VLMAdapter`."""
        return self.model.model, "visual"

    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        """See `VLMAdapter`; the image keeps its proportions."""
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        with rendering():
            text = self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        least = self.processor.image_processor.size["shortest_edge"]
        size = {"shortest_edge": min(least, self.tier_sizes[tier]), "longest_edge": self.tier_sizes[tier]}
        found = self.processor(images=[image], text=[text], images_kwargs={"size": size}, return_tensors="pt")
        return {name: tensor.to(self.model.device) for name, tensor in found.items()}

    def num_patches(self, inputs: Inputs) -> int:
        """See `VLMAdapter`."""
        return len(inputs["pixel_values"])

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Any:
        """See `VLMAdapter`."""
        encoder: Any = self.vision_encoder
        pixels = inputs["pixel_values"].type(encoder.dtype)
        return encoder(pixels, grid_thw=inputs["image_grid_thw"])

    def begin(self, inputs: Inputs) -> Decoding:
        """See `VLMAdapter`."""
        length = inputs["input_ids"].shape[1]
        positions = torch.arange(length, device=self.model.device)
        found = self.model(**inputs, cache_position=positions, use_cache=True, logits_to_keep=1)
        return Decoding(found.logits[:, -1], found.past_key_values, length)

    def go_on(self, decoding: Decoding, token: torch.Tensor) -> Decoding:
        """See `VLMAdapter`; the offset of the text's positions is the model's own, from its last `begin`."""
        position = torch.tensor([decoding.length], device=self.model.device)
        found = self.model(
            input_ids=token, past_key_values=decoding.cache, cache_position=position, use_cache=True, logits_to_keep=1
        )
        return Decoding(found.logits[:, -1], found.past_key_values, decoding.length + 1)


class Qwen25VLAdapter(QwenVLAdapter):
    """Dense; a block returns a tuple, the vision encoder its patches."""

    def skip(self, index: int) -> Skipped:
        """See `VLMAdapter`."""
        return Skipped(self.blocks[index], lambda hidden_states: hidden_states)

    def pooled_vision(self, encoding: torch.Tensor) -> torch.Tensor:
        """See `VLMAdapter`; there is one crop."""
        return encoding.pooler_output.mean(0)


class Qwen3VLAdapter(QwenVLAdapter):
    """Dense or with experts; the vision encoder also gives what DeepStack adds behind the first blocks.

    DeepStack adds to the hidden states behind a block whether or not that block runs.
    """

    def skip(self, index: int) -> Skipped:
        """See `VLMAdapter`."""
        return Skipped(self.blocks[index], lambda hidden_states: hidden_states)

    def routed(self, mixture: Any) -> Mapping[tuple[nn.Module, str], nn.Module]:
        """See `VLMAdapter`."""
        return {}  # transformers 5 runs only the experts that a token is routed to

    def pooled_vision(self, encoding: tuple[torch.Tensor, list[torch.Tensor]]) -> torch.Tensor:
        """See `VLMAdapter`; there is one crop."""
        return encoding.pooler_output.mean(0)
