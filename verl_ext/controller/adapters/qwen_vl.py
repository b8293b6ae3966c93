"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 in transformers, dense or with experts. A tier is a number of pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import nn
from transformers import DynamicCache, PreTrainedModel, ProcessorMixin
from transformers.modeling_outputs import BaseModelOutputWithPooling

from verl_ext.controller.adapters.base import DecodeState, Inputs, SkippedBlock, VLMAdapter
from verl_ext.data.image_questions import image_size
from verl_ext.errors import UserError
from verl_ext.rendering import rendering


class QwenVLAdapter(VLMAdapter):
    """Dense models and models with experts; `tier_sizes` are the maximum numbers of pixels of a scaled image.

    DeepStack (Qwen3-VL) adds features to the hidden states after a block, whether or not that block runs.
    """

    unit = "pixels"

    def __init__(self, model: PreTrainedModel, processor: ProcessorMixin, tier_sizes: Sequence[int]) -> None:
        """Refuse models whose blocks cannot be skipped.

        Raises:
            UserError: some blocks use sliding window attention; transformers reads the length of their caches from a
                block that may be skipped.
        """
        super().__init__(model, processor, tier_sizes)
        kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
        if len(kinds) > 1 and "sliding_attention" in kinds:
            raise UserError(
                f"{type(model).__name__} with both {' and '.join(sorted(kinds))} blocks cannot skip blocks; "
                "set use_sliding_window to false in its config.json"
            )

    def check_tiers(self, key: str) -> None:
        """Also reject tiers with less than one image token, or with the same number of them."""
        super().check_tiers(key)
        images = self.processor.image_processor
        side = images.patch_size * images.merge_size
        num_tokens = [size // side**2 for size in self.tier_sizes]
        if num_tokens[0] < 1 or len({*num_tokens}) < len(num_tokens):
            example = [count * side**2 for count in (64, 256, 1024)]
            raise UserError(
                f"{key}={list(self.tier_sizes)} are pixels for {type(self.model).__name__}, whose image tokens cover "
                f"{side}x{side} pixels each; set sizes that give every tier more tokens, such as {example}"
            )

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.model.language_model.layers

    @property
    def vision_site(self) -> tuple[nn.Module, str]:
        return self.model.model, "visual"

    def skipped_block(self, index: int) -> SkippedBlock:
        """A block returns only its hidden states."""
        return SkippedBlock(lambda hidden_states: hidden_states)

    def inputs(self, image: Image.Image, question: str, tier: int) -> Inputs:
        """The image keeps its aspect ratio."""
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        with rendering():
            text = self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        size = image_size(self.processor, self.tier_sizes[tier])
        inputs = self.processor(images=[image], text=[text], images_kwargs={"size": size}, return_tensors="pt")
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    def num_patches(self, inputs: Inputs) -> int:
        return len(inputs["pixel_values"])

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> BaseModelOutputWithPooling:
        encoder: Any = self.vision_encoder
        return encoder(inputs["pixel_values"].type(encoder.dtype), grid_thw=inputs["image_grid_thw"])

    def pooled_vision(self, encoding: BaseModelOutputWithPooling) -> torch.Tensor:
        """The mean over the merged patches (patches, vision_width) of the single crop."""
        return encoding.pooler_output.mean(0)

    def prefill(self, inputs: Inputs) -> DecodeState:
        output = self.model(**inputs, use_cache=True, logits_to_keep=1)
        return DecodeState(output.logits[:, -1], output.past_key_values, inputs["input_ids"].shape[1])

    def decode(self, state: DecodeState, token: torch.Tensor) -> DecodeState:
        """The model keeps the offset of text positions from its last `prefill`."""
        output = self.model(input_ids=token, past_key_values=state.cache, use_cache=True, logits_to_keep=1)
        return DecodeState(output.logits[:, -1], output.past_key_values, state.length + 1)


class Qwen35Adapter(QwenVLAdapter):
    """Qwen3.5, where most blocks use linear attention with caches of constant size."""

    def prefill(self, inputs: Inputs) -> DecodeState:
        length, cache = inputs["input_ids"].shape[1], CountedCache(config=self.model.config)
        output = self.model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache.length = length
        return DecodeState(output.logits[:, -1], cache, length)

    def decode(self, state: DecodeState, token: torch.Tensor) -> DecodeState:
        following = super().decode(state, token)
        following.cache.length = following.length
        return following


class CountedCache(DynamicCache):
    """A cache with an explicit length, because the block from which transformers reads the length may be skipped."""

    length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of earlier tokens."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of tokens that full attention covers, and their offset."""
        return self.length + query_length, 0
