"""Small vision-language models of each architecture with random weights and processors, and controllers for them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from torch import nn
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3ImageProcessor,
    Idefics3Processor,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2TokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.vlm import ControlledModel, fingerprint, load_adapter

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
SPECIAL += ["<|video_pad|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCABULARY = 288
TIERS = (1024, 4096, 9216)
BUDGETS_MS = (30.0, 60.0)
SUFFIX = "\nShort:"


def tokenizer() -> Qwen2TokenizerFast:
    """Single bytes and the special tokens of the Qwen family."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    with tempfile.TemporaryDirectory() as name:
        vocabulary, merges = Path(name, "vocab.json"), Path(name, "merges.txt")
        vocabulary.write_text(json.dumps(letters))
        merges.write_text("#version: 0.2\n")
        return Qwen2TokenizerFast(
            str(vocabulary), str(merges), unk_token=None, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
        )


def qwen3_vl_moe(seed: int = 0, **text: Any) -> tuple[nn.Module, Qwen3VLProcessor]:
    """Four blocks with eight experts each, four of them for a token."""
    torch.manual_seed(seed)
    config = Qwen3VLMoeConfig(
        text_config={
            **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16},
            **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
            **{"num_experts": 8, "num_experts_per_tok": 4, "max_position_embeddings": 4096},
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
            **text,
        },
        vision_config={
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
            **{"patch_size": 8, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        },
        **special_ids(),
    )
    return loud(Qwen3VLMoeForConditionalGeneration(config)), qwen3_processor()


def qwen2_5_vl(seed: int = 0, **text: Any) -> tuple[nn.Module, Qwen2_5_VLProcessor]:
    """Four dense blocks."""
    torch.manual_seed(seed)
    config = Qwen2_5_VLConfig(
        text_config={
            **{"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096},
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 1, 1]},
            **text,
        },
        vision_config={
            **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
            **{"patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1]},
        },
        **special_ids(),
    )
    images = Qwen2VLImageProcessor(patch_size=8, size={"shortest_edge": 256, "longest_edge": 65536})
    videos = Qwen2VLVideoProcessor(patch_size=8)
    processor = Qwen2_5_VLProcessor(images, tokenizer(), videos, chat_template=TEMPLATE)
    return loud(Qwen2_5_VLForConditionalGeneration(config)), processor


def qwen3_5(experts: bool = False, seed: int = 0) -> tuple[nn.Module, Qwen3VLProcessor]:
    """Four blocks, the second and the last of full attention, dense or with eight experts and a shared one."""
    torch.manual_seed(seed)
    text: dict[str, Any] = {
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "max_position_embeddings": 4096},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
    }
    vision = {
        **{"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32},
        **{"patch_size": 8, "num_position_embeddings": 64},
    }
    model: nn.Module
    if experts:
        text |= {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 8}
        text["num_experts_per_tok"] = 4
        model = Qwen3_5MoeForConditionalGeneration(
            Qwen3_5MoeConfig(text_config=text, vision_config=vision, **special_ids())
        )
    else:
        text["intermediate_size"] = 64
        model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision, **special_ids()))
    return loud(model), qwen3_processor()


def qwen3_processor() -> Qwen3VLProcessor:
    """A processor with a patch size of 8 pixels."""
    images = Qwen2VLImageProcessor(patch_size=8, size={"shortest_edge": 256, "longest_edge": 65536})
    return Qwen3VLProcessor(images, tokenizer(), Qwen3VLVideoProcessor(patch_size=8), chat_template=TEMPLATE)


IMAGE = "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"
PLAIN_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")


def idefics3(seed: int = 0) -> tuple[nn.Module, Idefics3Processor]:
    """Four dense blocks, and crops of 32 pixels; no adapter of the package is for it."""
    torch.manual_seed(seed)
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": [*SPECIAL, *IMAGE]})
    crop = {"longest_edge": 32}
    images = Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size=crop)
    processor = Idefics3Processor(images, words, image_seq_len=4, chat_template=PLAIN_TEMPLATE)
    config = Idefics3Config(
        text_config={
            **{"model_type": "llama", "vocab_size": len(words), "hidden_size": 32, "intermediate_size": 64},
            **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
            "max_position_embeddings": 4096,
        },
        vision_config={
            **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 32, "patch_size": 8},
        },
        scale_factor=2,
        image_token_id=words.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    return loud(Idefics3ForConditionalGeneration(config)), processor


def special_ids() -> dict[str, int]:
    """The ids of the special tokens in a Qwen configuration."""
    ids = tokenizer().convert_tokens_to_ids
    names = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    names |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    return {key: ids(token) for key, token in names.items()}


def continued(inputs: Mapping[str, torch.Tensor], tokens: Sequence[int]) -> dict[str, torch.Tensor]:
    """The model inputs for a prompt followed by answer tokens."""
    more = torch.tensor([tokens])
    added = {"input_ids": more, "attention_mask": torch.ones_like(more), "mm_token_type_ids": torch.zeros_like(more)}
    longer = {name: torch.cat([inputs[name], added[name]], dim=1) for name in added if name in inputs}
    return {**inputs, **longer}


def loud(model: nn.Module) -> nn.Module:
    """The model with weights large enough for every part of it to matter to its logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3 if "embed" not in name else 1.0)
    return model.eval()


class StandInConfig(PreTrainedConfig):
    """The configuration of the stand-in for Molmo."""

    model_type = "molmo"

    def __init__(
        self, num_experts: int = 8, top_k: int = 4, num_blocks: int = 4, width: int = 32, **others: Any
    ) -> None:
        self.num_experts, self.top_k, self.num_blocks, self.width = num_experts, top_k, num_blocks, width
        super().__init__(**others)


class StandInMLP(nn.Module):
    """One expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, 24), nn.Linear(24, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


class StandInMixture(nn.Module):
    """A mixture by the names of `MolmoeSparseMoeBlock`, which counts the tokens that its experts see."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.num_runs = num_experts, top_k, 0
        self.gate = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(StandInMLP(width) for _ in range(num_experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(hidden_states)
        weights, chosen = logits.softmax(-1).topk(self.top_k, dim=-1)
        total = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self.experts):
            share = (weights * (chosen == number)).sum(-1)
            if (tokens := share > 0).any():
                self.num_runs += int(tokens.sum())
                total[tokens] += share[tokens][:, None] * expert(hidden_states[tokens])
        return total, logits


class StandInBlock(nn.Module):
    """A block by the signature of `MolmoDecoderLayer`: one attention head, its own cache, and optionally experts."""

    def __init__(self, width: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "out")})
        self.mlp = StandInMixture(width, num_experts, top_k) if num_experts else StandInMLP(width)

    def forward(
        self,
        x: torch.Tensor,
        attention_bias: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        drop_mask: torch.Tensor | None = None,
        layer_past: tuple[torch.Tensor, torch.Tensor] | None = None,
        use_cache: bool = False,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        q, k, v = (self.attn[name](x) for name in "qkv")
        if layer_past is not None:
            k, v = torch.cat([layer_past[0], k], dim=-2), torch.cat([layer_past[1], v], dim=-2)
        scores = q @ k.transpose(-1, -2) / x.shape[-1] ** 0.5 + attention_bias
        x = x + self.attn["out"](scores.softmax(-1) @ v)
        found = self.mlp(x)
        return x + (found[0] if isinstance(found, tuple) else found), (k, v) if use_cache else None


class StandInMolmoModel(nn.Module):
    """The inner model by the names of `Molmo`: `transformer.wte`, `transformer.blocks`, `vision_backbone`."""

    def __init__(self, width: int, num_blocks: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        blocks = nn.ModuleList(StandInBlock(width, num_experts, top_k) for _ in range(num_blocks))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCABULARY, width), "blocks": blocks})
        self.positions = nn.Embedding(512, width)
        self.vision_backbone = StandInVision(width)


class StandInVision(nn.Module):
    """(1, crops, patches, pixels) to features (1, crops, patches, width) and no class embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(12, width)

    def forward(self, images: torch.Tensor, image_masks: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return self.project(images), None


class StandInMolmo(PreTrainedModel):
    """`MolmoForCausalLM` by its signature, on one head and one projection; legacy caches as it has them.

    Like the published class, which is written for transformers 4, it does not call `post_init`, defines `tie_weights`
    without parameters, and does not cast images.
    """

    config_class = StandInConfig

    def __init__(self, config: StandInConfig) -> None:
        super().__init__(config)
        self.model = StandInMolmoModel(config.width, config.num_blocks, config.num_experts, config.top_k)
        self.lm_head = nn.Linear(config.width, VOCABULARY, bias=False)

    def tie_weights(self) -> None:  # type: ignore[override]
        """Nothing to do."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.transformer.wte

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        images: torch.Tensor | None = None,
        image_masks: torch.Tensor | None = None,
        image_input_idx: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: list | None = None,
        use_cache: bool = False,
        last_logits_only: bool = False,
    ) -> CausalLMOutputWithPast:
        past = 0 if past_key_values is None else past_key_values[0][0].size(-2)
        if past:
            assert attention_mask.shape == (1, past + 1) and len(past_key_values) == len(self.model.transformer.blocks)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1])[None]
        x = self.model.transformer.wte(input_ids) + self.model.positions(position_ids)
        if images is not None:
            features, _ = self.model.vision_backbone(images, image_masks)
            x = x.index_add(1, image_input_idx.flatten(), features.flatten(1, 2))
        bias = torch.full((input_ids.shape[1], past + input_ids.shape[1]), float("-inf"), dtype=x.dtype).triu(past + 1)
        caches = []
        for number, block in enumerate(self.model.transformer.blocks):
            layer_past = None if past_key_values is None else past_key_values[number]
            x, cache = block(x, attention_bias=bias, layer_past=layer_past, use_cache=use_cache)
            if use_cache:
                assert cache is not None
                caches.append(cache)
        logits = self.lm_head(x[:, -1:] if last_logits_only else x)
        return CausalLMOutputWithPast(logits=logits, past_key_values=caches if use_cache else None)


class StandInProcessor:
    """`MolmoProcessor` by its `process`: a global crop, and as many more as `max_crops` and the image allow."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()

    def process(self, images: list, text: str, images_kwargs: dict[str, int]) -> dict[str, torch.Tensor]:
        crops = 1 + min(images_kwargs["max_crops"], images[0].width // 16)
        pixels = torch.linspace(0, 1, crops * 4 * 12).view(crops, 4, 12)
        tokens = self.tokenizer(text)["input_ids"]
        places = torch.arange(crops * 4).view(crops, 4)
        return {
            "input_ids": torch.tensor([0] * crops * 4 + tokens),
            "images": pixels,
            "image_masks": torch.ones(crops, 4),
            "image_input_idx": places,
        }


def molmo(seed: int = 0, **arguments: int) -> tuple[nn.Module, StandInProcessor]:
    """The stand-in with experts, or without by `num_experts=0`."""
    torch.manual_seed(seed)
    return loud(StandInMolmo(StandInConfig(**arguments))), StandInProcessor()


def write_molmo(folder: Path) -> nn.Module:
    """Write the stand-in as a checkpoint with its own code, as on the Hub, and return the model."""
    model, _ = molmo()
    classes = {"AutoConfig": "StandInConfig", "AutoModelForCausalLM": "Molmo", "AutoProcessor": "Processor"}
    folder.mkdir()
    (folder / "code.py").write_text(
        "from tests.helpers.vlms import StandInConfig, StandInMolmo, StandInProcessor\n\n\n"
        "class Molmo(StandInMolmo):\n    pass\n\n\n"
        "class Processor:\n"
        "    from_pretrained = classmethod(lambda cls, *_, **__: StandInProcessor())\n"
        "    register_for_auto_class = classmethod(lambda cls, *_: None)\n"
    )
    auto_map = {name: f"code.{class_name}" for name, class_name in classes.items()}
    for name in ("config.json", "processor_config.json"):
        (folder / name).write_text(json.dumps({**model.config.to_diff_dict(), "auto_map": auto_map}))
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return model


def write_model(folder: Path, seed: int = 0) -> Path:
    """A `qwen3_vl_moe` of four blocks with its processor."""
    model, processor = qwen3_vl_moe(seed)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def write_controller(folder: Path, model: Path, suffix: str = SUFFIX) -> Path:
    """An export for a model of `write_model`, with large random weights, so that choices differ."""
    adapter = load_adapter(str(model), TIERS)
    vlm = ControlledModel(str(model), TIERS, 3, suffix, False, fingerprint(adapter.model)).to_dict()
    knobs = {**vars(adapter.space(2, 4, (1, 2, 4))), "low_ms": BUDGETS_MS[0], "high_ms": BUDGETS_MS[1]}
    torch.manual_seed(3)
    controller = BudgetController(BudgetControllerConfig(**knobs, vision_width=32, language_width=32, vlm=vlm))
    for parameter in controller.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    controller.save_pretrained(folder)
    return folder
