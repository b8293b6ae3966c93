"""A Qwen3-VL with experts of 1.7 million parameters, random weights, and its processor."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from verl_ext.data.prepare.quickstart.tokenizer import PAD, TURN_END, TURN_START, train_tokenizer
from verl_ext.data.prepare.vqa.cards import COLOURS, GLYPHS, QUESTIONS, SIDE, added

if TYPE_CHECKING:
    from transformers import Qwen3VLMoeForConditionalGeneration, Qwen3VLProcessor

HIDDEN_SIZE = 64
NUM_BLOCKS = 6
NUM_EXPERTS, EXPERTS_PER_TOKEN = 8, 4
PATCH = 8
VISION_WIDTH, VISION_MLP = 128, 1024
"""Wide enough that the patches of the high tier take a good part of the time, as those of large models do."""
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' }}{%- for part in message.content %}"
    "{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- else %}{{- part.text }}"
    "{%- endif %}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>' }}{%- endif %}"
)
"""Without the names of the roles, which take turns anyway: tokens that would be a third of a chat."""


def weight_std(width: int) -> float:
    """Of the first weights of a layer so wide: with the usual 0.02 a narrow model is slow to begin."""
    return 0.8 / math.sqrt(width)


def build_processor() -> Qwen3VLProcessor:
    """A tokenizer for the cards' words, and an image processor for their sizes."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    digits = range(len(GLYPHS))
    answers = [*COLOURS, *map(str, digits), *itertools.starmap(added, itertools.product(digits, repeat=2))]
    turns = [{"role": "user", "content": text} for text in QUESTIONS.values()]
    turns += [{"role": "assistant", "content": text} for text in answers]
    tokenizer = train_tokenizer([turns, turns])  # twice, for words that occur once are not learnt
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_START, TURN_END, *VISION]})
    tokenizer.chat_template = TEMPLATE
    sizes = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": SIDE**2}
    images = Qwen2VLImageProcessor(patch_size=PATCH, temporal_patch_size=1, size=sizes)
    videos = Qwen3VLVideoProcessor(patch_size=PATCH, temporal_patch_size=1)
    return Qwen3VLProcessor(images, tokenizer, videos, chat_template=TEMPLATE)


def build_model(processor: Qwen3VLProcessor, seed: int) -> Qwen3VLMoeForConditionalGeneration:
    """The model for a processor.

    Args:
        processor: gives the vocabulary and the special tokens.
        seed: of the weights; the caller's random state is left as it was.
    """
    import torch
    from transformers import GenerationConfig, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    tokenizer = processor.tokenizer
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(VISION))
    config = Qwen3VLMoeConfig(
        text_config=_text_config(len(tokenizer)),
        vision_config=_vision_config(),
        vision_start_token_id=start,
        vision_end_token_id=end,
        image_token_id=image,
        video_token_id=video,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLMoeForConditionalGeneration(config)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.convert_tokens_to_ids(PAD)}
    model.generation_config = GenerationConfig(**ends)
    return model


def _text_config(vocab_size: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "moe_intermediate_size": HIDDEN_SIZE // 2,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "max_position_embeddings": 1024,
        "initializer_range": weight_std(HIDDEN_SIZE),
        "rope_scaling": {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True},
    }


def _vision_config() -> dict[str, Any]:
    return {
        "depth": 2,
        "hidden_size": VISION_WIDTH,
        "intermediate_size": VISION_MLP,
        "num_heads": 4,
        "out_hidden_size": HIDDEN_SIZE,
        "patch_size": PATCH,
        "temporal_patch_size": 1,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [0],
        "initializer_range": weight_std(VISION_WIDTH),
    }
