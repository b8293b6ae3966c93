"""What each knob of a budget controller saves: milliseconds and FLOPs beside the model as it was released, in one run.

    python -m benchmarks.adaptive [--model DIR --tier-sizes 65536 262144 --topk-choices 2 4 8] [--output FILE.json]

Each knob is turned alone, from all of the model downwards. Every round runs each configuration once, the order
reversed from one round to the next, and the median over the rounds counts; FLOPs are torch's count of the same work. A
run is the encoding of one image, the prompt, and `--new-tokens` decoded tokens, whatever they say. Without a model,
one of random weights is made: a Qwen3-VL of 8 blocks with 16 experts each, 8 of them for a token. The last line is what
a controller takes to decide, beside the encoding at the lowest tier that it looks at. The exit status is 1 where a
knob's latency does not fall at each turn.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from benchmarks.about import about
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.calibration import deciding_ms
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.execution import Executor
from verl_ext.controller.latency import Latency, LatencyMeter
from verl_ext.controller.loading import default_device, load_adapter
from verl_ext.data.prepare.vqa.cards import SIDE
from verl_ext.data.prepare.vqa.model import build_processor
from verl_ext.data.questions import ImageQuestion
from verl_ext.errors import UserError, exit_on_user_error
from verl_ext.tell import tell

QUESTION = "Sum of the digits?"
HIDDEN = 256
"""Width of the controller, as recipes have it unless they say otherwise."""
Run = tuple[str, str, Configuration, bool]
"""Knob, its value, the configuration, and whether the model runs exactly as it was released."""


def made_model(directory: Path) -> str:
    """A model of random weights with its processor."""
    processor = build_processor()
    ids = processor.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"])
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    text = {"vocab_size": len(processor.tokenizer), "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    text |= {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 128}
    text |= {"num_experts": 16, "num_experts_per_tok": 8, "max_position_embeddings": 4096}
    text |= {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True}}
    vision = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 256}
    vision |= {"patch_size": 8, "temporal_patch_size": 1, "num_position_embeddings": 324}
    vision |= {"deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, **dict(zip(names, ids)))
    torch.manual_seed(0)
    Qwen3VLMoeForConditionalGeneration(config).save_pretrained(directory)
    processor.save_pretrained(directory)
    return str(directory)


def runs_of(space: ConfigurationSpace) -> Iterator[Run]:
    """The model as it was released, and each knob turned alone, the dearest setting first."""
    everything = [True] * space.num_blocks
    yield "model", "as released", space.full, True
    for tier in reversed(range(len(space.tiers))):
        yield "tier", space.tiers[tier], space.configuration(tier, everything), False
    for count in range(space.num_blocks, 0, -1):
        blocks = [block < count for block in range(space.num_blocks)]
        yield "blocks", str(count), space.configuration(len(space.tiers) - 1, blocks), False
    for topk in reversed(space.topk_choices):
        yield "top-k", str(topk), space.configuration(len(space.tiers) - 1, everything, topk), False


class Bench:
    """Runs configurations of a model on one picture."""

    def __init__(self, adapter: VLMAdapter, new_tokens: int) -> None:
        self.adapter, self._new_tokens = adapter, new_tokens
        pixels = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8)
        scale = max(1, round(max(adapter.tier_sizes) ** 0.5 / SIDE)) if adapter.unit == "pixels" else 1
        self._picture = Image.fromarray(pixels).resize((scale * SIDE, scale * SIDE))
        self._inputs = [adapter.inputs(self._picture, QUESTION, tier) for tier in range(len(adapter.tier_sizes))]

    def run(self, configuration: Configuration, exact: bool) -> Latency:
        """How long one run takes."""
        with self.adapter.configured(configuration, exact=exact), LatencyMeter(self.adapter) as meter:
            self.adapter.generate(self._inputs[configuration.tier], self._new_tokens, [])
        return meter.latency

    def deciding_ms(self, space: ConfigurationSpace, rounds: int) -> float:
        """How long a controller of the usual width takes, the median over rounds."""
        encoded = io.BytesIO()
        self._picture.save(encoded, "png")
        questions = [ImageQuestion(str(number), encoded.getvalue(), QUESTION, ("0",)) for number in range(rounds)]
        return deciding_ms(Executor(self.adapter, self._new_tokens), space, questions, HIDDEN)

    def flops(self, configuration: Configuration, exact: bool) -> int:
        """Of one run."""
        with self.adapter.configured(configuration, exact=exact), FlopCounterMode(display=False) as counter:
            self.adapter.generate(self._inputs[configuration.tier], self._new_tokens, [])
        return counter.get_total_flops()


def measure(bench: Bench, space: ConfigurationSpace, rounds: int) -> list[dict[str, Any]]:
    """A row for each run of `runs_of`."""
    runs = list(runs_of(space))
    found: list[list[Latency]] = [[] for _ in runs]
    for number in tqdm(range(rounds + 1), desc="rounds", unit="round", disable=None):
        for place in sorted(range(len(runs)), reverse=number % 2 == 1):
            latency = bench.run(*runs[place][2:])
            if number:  # the first round is for warming up
                found[place].append(latency)
    rows = [row_of(run, latencies, bench.flops(*run[2:])) for run, latencies in zip(tqdm(runs, "FLOPs"), found)]
    for row in rows:
        row["ms_ratio"] = row["total_ms"] / rows[0]["total_ms"]
        row["flops_ratio"] = row["gflops"] / rows[0]["gflops"]
    return rows


def row_of(run: Run, latencies: list[Latency], flops: int) -> dict[str, Any]:
    """The medians of one run."""
    parts = ("vision_ms", "prefill_ms", "decode_ms", "total_ms")
    medians = {part: statistics.median(getattr(latency, part) for latency in latencies) for part in parts}
    return {"knob": run[0], "value": run[1], **medians, "gflops": flops / 1e9}


def not_falling(rows: list[dict[str, Any]]) -> list[str]:
    """Knobs, and the values at which a cheaper setting was no quicker."""
    pairs = [(a, b) for a, b in zip(rows, rows[1:]) if a["knob"] == b["knob"]]
    return [f"{b['knob']} {b['value']}" for a, b in pairs if b["total_ms"] >= a["total_ms"]]


def table_of(rows: list[dict[str, Any]]) -> str:
    """The rows for people."""
    head = f"{'knob':<8}{'value':>12}{'vision':>9}{'prefill':>9}{'decode':>9}"
    head += f"{'total ms':>10}{'GFLOP':>9}{'ms':>7}{'FLOPs':>7}"
    lines = [
        f"{row['knob']:<8}{row['value']:>12}{row['vision_ms']:>9.2f}{row['prefill_ms']:>9.2f}{row['decode_ms']:>9.2f}"
        f"{row['total_ms']:>10.2f}{row['gflops']:>9.3f}{row['ms_ratio']:>7.2f}{row['flops_ratio']:>7.2f}"
        for row in rows
    ]
    return "\n".join([head, *lines])


@exit_on_user_error()
def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub name; without it one is made")
    parser.add_argument("--tier-sizes", type=int, nargs="+", default=[2304, 9216, 20736], help="of the tiers")
    parser.add_argument("--topk-choices", type=int, nargs="*", default=[1, 2, 4, 8], help="numbers of experts")
    parser.add_argument("--rounds", type=int, default=15, help="of which the median counts (default 15)")
    parser.add_argument("--new-tokens", type=int, default=8, help="decoded in each run (default 8)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if min(arguments.rounds, arguments.new_tokens) < 1:
        raise UserError("--rounds and --new-tokens must be at least 1")
    device, dtype = default_device()
    with tempfile.TemporaryDirectory() as name:
        path = arguments.model or made_model(Path(name))
        adapter = load_adapter(path, arguments.tier_sizes, device=device, dtype=dtype)
    space = adapter.space(1, len(adapter.blocks), arguments.topk_choices)
    bench = Bench(adapter, arguments.new_tokens)
    rows = measure(bench, space, arguments.rounds)
    deciding = bench.deciding_ms(space, arguments.rounds)
    tell(table_of(rows))
    tell(f"deciding {deciding:.2f} ms, {100 * deciding / rows[0]['total_ms']:.2f} % of the model as released")
    if arguments.output:
        found = {
            **about("torch", "transformers"),
            "threads": torch.get_num_threads(),
            "model": arguments.model or "random",
        }
        found |= {"deciding_ms": deciding, "rows": rows}
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    if wrong := not_falling(rows):
        tell(f"latency does not fall at: {', '.join(wrong)}")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
