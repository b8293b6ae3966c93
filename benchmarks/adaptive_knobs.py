"""What `benchmarks.adaptive` measures: a model's knobs, each turned alone."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from benchmarks.harness import Results, in_rounds, medians, ranges
from verl_ext.console import progress_bar
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.execution import Latency, LatencyMeter, VLMRunner
from verl_ext.controller.latency import measure_deciding_ms
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.controller.vlm import default_device, load_adapter
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.data.prepare.vqa import SIDE, build_processor

QUESTION = "Sum of the digits?"
HIDDEN = 256
"""Width of the controller, the default of recipes."""
KnobRun = tuple[str, str, Configuration]
"""Knob, its value, and the configuration."""


def make_vlm(directory: Path) -> str:
    """Write a vision-language model with random weights and its processor; returns its path."""
    processor = build_processor()
    ids = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    text: dict[str, Any] = {"vocab_size": len(processor.tokenizer), "hidden_size": 256, "intermediate_size": 512}
    text |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 128}
    text |= {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 8, "max_position_embeddings": 4096}
    text |= {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}}
    vision: dict[str, Any] = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4}
    vision |= {"out_hidden_size": 256, "patch_size": 8, "temporal_patch_size": 1, "num_position_embeddings": 324}
    vision |= {"deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **dict(zip(names, ids)))
    torch.manual_seed(0)
    Qwen3VLMoeForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return str(directory)


def runs_of(space: ConfigurationSpace) -> Iterator[KnobRun]:
    """The released model, and each knob turned alone, the most expensive setting first."""
    everything = [True] * space.num_blocks
    yield "model", "as released", space.full
    for tier in reversed(range(len(space.tiers))):
        yield "tier", space.tiers[tier], space.configuration(tier, everything)
    for count in range(space.num_blocks, 0, -1):
        blocks = [block < count for block in range(space.num_blocks)]
        yield "blocks", str(count), space.configuration(len(space.tiers) - 1, blocks)
    for topk in reversed(space.topk_choices):
        yield "top-k", str(topk), space.configuration(len(space.tiers) - 1, everything, topk)


class KnobRunner:
    """Runs configurations of a model on one image."""

    def __init__(self, adapter: VLMAdapter, new_tokens: int) -> None:
        self.adapter, self._new_tokens = adapter, new_tokens
        pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        scale = max(1, round(max(adapter.tier_sizes) ** 0.5 / SIDE)) if adapter.unit == "pixels" else 1
        self._image = Image.fromarray(pixels).resize((scale * SIDE, scale * SIDE))
        self._inputs = [adapter.inputs(self._image, QUESTION, tier) for tier in range(len(adapter.tier_sizes))]

    def generate(self, configuration: Configuration) -> None:
        """One run."""
        with self.adapter.configured(configuration):
            self.adapter.generate(self._inputs[configuration.tier], self._new_tokens, [])

    def run(self, configuration: Configuration) -> Latency:
        """The latency of one run."""
        with LatencyMeter(self.adapter) as meter:
            self.generate(configuration)
        return meter.latency

    def questions(self, count: int) -> list[ImageQuestion]:
        """The question about the image, with different ids."""
        encoded = io.BytesIO()
        self._image.save(encoded, "png")
        return [ImageQuestion(str(number), encoded.getvalue(), QUESTION, ("0",)) for number in range(count)]

    def flops(self, configuration: Configuration) -> int:
        """FLOPs of one run."""
        with flop_counter() as counter:
            self.generate(configuration)
        return counter.get_total_flops()


def flop_counter() -> FlopCounterMode:
    """torch's counter, extended to the experts' grouped matrix products, for which torch 2.13 has no formula."""
    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_mm_flops})


def grouped_mm_flops(tokens: torch.Size, weights: torch.Size, *_: object, **__: object) -> int:
    """FLOPs for tokens (tokens, in), sorted by expert, and weights (experts, in, out); one expert per token."""
    return 2 * tokens[0] * weights[-2] * weights[-1]


def measure(model: str | None, tier_sizes: list[int], topk_choices: list[int], new_tokens: int, rounds: int) -> Results:
    """Measure every run of `runs_of`, and the time of a decision; returns a row for each run.

    Args:
        model: directory or Hub name; None creates a model with random weights.
        tier_sizes: sizes of the tiers, in pixels.
        topk_choices: numbers of experts.
        new_tokens: tokens decoded in each run.
        rounds: number of rounds after a warm-up round.
    """
    device, dtype = default_device()
    with tempfile.TemporaryDirectory() as name:
        adapter = load_adapter(model or make_vlm(Path(name)), tier_sizes, device=device, dtype=dtype)
    space, runner = adapter.space(1, len(adapter.blocks), topk_choices), KnobRunner(adapter, new_tokens)
    runs = list(runs_of(space))
    sides = {str(place): partial(runner.run, run[2]) for place, run in enumerate(runs)}
    latencies = in_rounds(sides, rounds, "measuring", warm_up=1)
    counting = progress_bar(runs, desc="counting FLOPs", unit="runs")
    rows = [row_of(run, found, runner.flops(run[2])) for run, found in zip(counting, latencies.values())]
    deciding = partial(measure_deciding_ms, VLMRunner(adapter, new_tokens), space, runner.questions(1), HIDDEN)
    for row in rows:
        row["ms_ratio"] = row["total_ms"] / rows[0]["total_ms"]
        row["flops_ratio"] = row["gflops"] / rows[0]["gflops"]
    return {
        "model": model or "random",
        "threads": torch.get_num_threads(),
        **medians_and_ranges([{"deciding_ms": deciding()} for _ in range(rounds)]),
        "rows": rows,
    }


def row_of(run: KnobRun, latencies: list[Latency], flops: int) -> Results:
    """The medians of one run's parts and of their total, with their ranges."""
    parts = ("vision_ms", "prefill_ms", "decode_ms", "total_ms")
    numbers = [{part: getattr(latency, part) for part in parts} for latency in latencies]
    return {"knob": run[0], "value": run[1], **medians_and_ranges(numbers), "gflops": flops / 1e9}


def medians_and_ranges(rounds: list[dict[str, float]]) -> Results:
    """The median of each number, and its range as `NAME_range`."""
    return {**medians(rounds), **{f"{name}_range": between for name, between in ranges(rounds).items()}}
