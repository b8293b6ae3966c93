"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 as transformers has them, dense or with experts: tiers are pixels of the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from verl_ext.controller.adapters.base import Decoding, Inputs, VLMAdapter
from verl_ext.controller.adapters.swap import Skipped
from verl_ext.errors import UserError
from verl_ext.rendering import rendering


class QwenVLAdapter(VLMAdapter):
    """Dense or with experts; `tier_sizes` are the most pixels that an image is scaled to.

    DeepStack (Qwen3-VL) adds to the hidden states behind a block whether or not that block runs.
    """

    unit = "pixels"

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int]) -> None:
        """See `VLMAdapter`.

        Raises:
            UserError: some of its blocks attend to a sliding window, and the length of those caches is asked of a
                block that may be skipped.
        """
        super().__init__(model, processor, tier_sizes)
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if len(kinds) > 1 and "sliding_attention" in kinds:
            raise UserError(
                f"{type(model).__name__} with blocks of {' and '.join(sorted(kinds))} cannot skip any; "
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

    def skip(self, index: int) -> Skipped:
        """See `VLMAdapter`; a block returns its hidden states alone."""
        return Skipped(lambda hidden_states: hidden_states)

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
    def encode(self, inputs: Inputs) -> BaseModelOutputWithPooling:
        """See `VLMAdapter`."""
        encoder: Any = self.vision_encoder
        return encoder(inputs["pixel_values"].type(encoder.dtype), grid_thw=inputs["image_grid_thw"])

    def pooled_vision(self, encoding: BaseModelOutputWithPooling) -> torch.Tensor:
        """See `VLMAdapter`; there is one crop, of whose merged patches (patches, vision width) this is the mean."""
        return encoding.pooler_output.mean(0)

    def begin(self, inputs: Inputs) -> Decoding:
        """See `VLMAdapter`."""
        found = self.model(**inputs, use_cache=True, logits_to_keep=1)
        return Decoding(found.logits[:, -1], found.past_key_values, inputs["input_ids"].shape[1])

    def go_on(self, decoding: Decoding, token: torch.Tensor) -> Decoding:
        """See `VLMAdapter`; the offset of the text's positions is the model's own, from its last `begin`."""
        found = self.model(input_ids=token, past_key_values=decoding.cache, use_cache=True, logits_to_keep=1)
        return Decoding(found.logits[:, -1], found.past_key_values, decoding.length + 1)


class Qwen35Adapter(QwenVLAdapter):
    """Most blocks are of linear attention, whose caches are states of one size whatever the length."""

    def begin(self, inputs: Inputs) -> Decoding:
        """See `VLMAdapter`."""
        length, cache = inputs["input_ids"].shape[1], CountedCache(config=self.model.config)
        found = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.length = length
        return Decoding(found.logits[:, -1], cache, length)

    def go_on(self, decoding: Decoding, token: torch.Tensor) -> Decoding:
        """See `VLMAdapter`."""
        found = super().go_on(decoding, token)
        found.cache.length = found.length
        return found


class CountedCache(DynamicCache):
    """Is told its length, which others ask of their first block of full attention; that one may be skipped."""

    length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens were seen before."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """How many tokens full attention sees, and how many of the first ones it does not."""
        return self.length + query_length, 0
