"""The parts of `benchmarks.gpu_check` that measure time and memory: training steps, saves, the controller's model.

    python -m benchmarks.side gpu_speed SCRATCH PART WORD ...

SCRATCH is the directory of the check, with its `settings.json`.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
import torch.distributed as dist
import transformers
from omegaconf import DictConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from benchmarks.gpu_check import Settings
from benchmarks.gpu_trainer import build_trainer, join_ranks, sft_config
from verl_ext.controller.calibration import calibrate
from verl_ext.controller.configuration import Configuration
from verl_ext.controller.loading import default_device, load_adapter
from verl_ext.distributed import on_rank_zero
from verl_ext.files import GIB, free_bytes
from verl_ext.model_files import save_tokenizer
from verl_ext.plan.hardware import HARDWARE, Hardware
from verl_ext.plan.links import Cluster
from verl_ext.plan.plan import Plan, make_plan
from verl_ext.plan.shape import ModelShape, shape_of
from verl_ext.plan.workload import Lengths
from verl_ext.trainer.lora import uses_lora

if TYPE_CHECKING:
    from benchmarks.adaptive_knobs import Bench

WARM_UP = 2
"""Steps that are not counted."""
ROW = 4096
"""Tokens of a micro-batch, and of the longest sample."""
CHECKPOINTING = "model.enable_gradient_checkpointing=true"
TEXT = "def add(left, right): return left + right\n"


@dataclass(frozen=True)
class Shape:
    """Dimensions of a Qwen2 model and the size of its steps.

    Attributes:
        hidden, intermediate, layers, heads, kv_heads, vocab, tied: of the model.
        micro_batches: of a step on a rank.
        row: tokens of a micro-batch.
        steps: with those that are not counted.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    micro_batches: int = 4
    row: int = ROW
    steps: int = 8


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 2048, True, micro_batches=2, row=512, steps=4),
    "0.5b": Shape(896, 4864, 24, 14, 2, 151936, True),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936, True),
    "3b": Shape(2048, 11008, 36, 16, 2, 151936, True),
    "7b": Shape(3584, 18944, 28, 28, 4, 152064, False, micro_batches=2, steps=6),
}
"""Those of Qwen2.5, by name."""


# Training steps


def steps(settings: Settings, name: str, *overrides: str) -> None:
    """Seconds, MFU and peak memory of training steps."""
    trainer = trainer_of(settings, name, overrides)
    if trainer is None:
        return
    times, tokens, pairs = [], [], []
    batches = trainer.remaining_batches()
    for _ in range(SHAPES[name].steps):
        batch = next(batches)
        times.append(seconds_of(trainer.training_step, batch))
        counts = torch.tensor([sum(batch.lengths), sum(length**2 for length in batch.lengths)], dtype=torch.float64)
        dist.all_reduce(counts)
        tokens.append(float(counts[0]))
        pairs.append(float(counts[1]))
    if dist.get_rank() == 0:
        report(settings, trainer, times, tokens, pairs)


def report(
    settings: Settings, trainer: Any, times: Sequence[float], tokens: Sequence[float], pairs: Sequence[float]
) -> None:
    """Add the rows of a run.

    MFU counts 6 operations for each token and each parameter that it is multiplied by (Kaplan et al. 2020, arXiv
    2001.08361, table 1), 4 with LoRA, whose frozen weights have no gradients; and with attention 12 x layers x width of
    the heads for each pair of tokens, of which causal attention has half.

    Args:
        settings: of the check.
        trainer: that has made the steps.
        times: seconds of each step.
        tokens: of each step, over all ranks.
        pairs: sum of the squared lengths of each step's samples, over all ranks.
    """
    hardware, shape = hardware_here(), model_shape(trainer.config)
    median = statistics.median(times[WARM_UP:])
    kept = slice(WARM_UP, None)
    rate = sum(tokens[kept]) / sum(times[kept])
    settings.add_row("step", median, "s", note=f"{min(times[kept]):.3f} to {max(times[kept]):.3f}")
    settings.add_row("first step", times[0], "s")
    settings.add_row("throughput", rate, "tokens/s", note=f"{sum(tokens[kept]) / len(tokens[kept]):.0f} tokens a step")
    by_lora = uses_lora(trainer.config)
    dense = (4 if by_lora else 6) * shape.matmul_numel * rate
    attention = 6 * shape.num_layers * shape.num_heads * shape.head_dim * sum(pairs[kept]) / sum(times[kept])
    peak = hardware.flops * dist.get_world_size()
    if hardware.source:
        what = "MFU by 4N" if by_lora else "MFU by 6N"
        settings.add_row(what, 100 * dense / peak, "%")
        settings.add_row(f"{what} and attention", 100 * (dense + attention) / peak, "%")
    if by_lora:
        settings.skip("the plan has no formulas for LoRA, so no memory is predicted")
    else:
        add_memory(settings, plan_of(trainer.config, hardware, shape, trainer))
    if trainer.device_name == "cuda":
        settings.add_row("peak of allocated memory", torch.cuda.max_memory_allocated() / GIB, "GiB")
        settings.add_row("peak of reserved memory", torch.cuda.max_memory_reserved() / GIB, "GiB")


def add_memory(settings: Settings, plan: Plan) -> None:
    """What the plan says, and how far it is from what was allocated."""
    predicted = plan.memory.peak_bytes
    settings.add_row("peak memory by the plan", predicted / GIB, "GiB")
    if torch.cuda.is_available():
        settings.add_row("plan over allocated memory", predicted / torch.cuda.max_memory_allocated())


def seconds_of(work: Callable[[Any], object], argument: Any) -> float:
    """Seconds until work is done on the GPU too."""
    start = time.perf_counter()
    work(argument)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def trainer_of(settings: Settings, name: str, overrides: Sequence[str]) -> Any | None:
    """A trainer of a shape; None, with a row that says why, where the plan or the disk has no room for it.

    Gradient checkpointing is turned on where the plan says that a shape fits only with it.
    """
    shape, config = SHAPES[name], config_of(settings, name, overrides)
    if not uses_lora(config) and why_not(config, shape):
        config = config_of(settings, name, [*overrides, CHECKPOINTING])
    reason = on_rank_zero(lambda: (not uses_lora(config) and why_not(config, shape)) or no_room(settings, name))
    if reason:
        if dist.get_rank() == 0:
            settings.skip(reason)
        return None
    on_rank_zero(lambda: write_inputs(settings, name))
    trainer = build_trainer(config)
    if trainer.device_name == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return trainer


def no_room(settings: Settings, name: str) -> str:
    """Why the disk has no room for a shape's weights; empty if it has."""
    directory, needed = directory_of(settings, name), 1.2 * 2 * shape_of(qwen2(SHAPES[name])).numel
    free = free_bytes(directory.parent)
    if directory.exists() or free > needed:
        return ""
    return f"its weights need {needed / GIB:.0f} GiB of disk, and {free / GIB:.0f} GiB are free"


def directory_of(settings: Settings, name: str) -> Path:
    """Where a shape's weights and chats are."""
    return Path(settings.scratch) / f"shape_{name}"


def config_of(settings: Settings, name: str, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a shape."""
    shape, directory = SHAPES[name], directory_of(settings, name)
    words = [
        f"data.train_files={directory / 'chats.parquet'}",
        f"data.max_length={shape.row}",
        "data.truncation=right",
        f"data.max_tokens_per_gpu={shape.row}",
        f"data.train_batch_size={samples_of_step(shape) * settings.num_gpus}",
        "model.mixed_precision=auto",
        "optim.lr=1e-5",
    ]
    return sft_config(settings, directory / "model", *words, *overrides)


def samples_of_step(shape: Shape) -> int:
    """Of a rank; a sample has a quarter of a row in the mean."""
    return 4 * shape.micro_batches


def why_not(config: DictConfig, shape: Shape) -> str:
    """Why the plan says that it does not fit; empty if it fits. The CPU of a tiny check always has room."""
    if not torch.cuda.is_available():
        return ""
    plan = plan_of(config, hardware_here(), shape_of(qwen2(shape)))
    needed, room = plan.memory.peak_bytes / GIB, plan.cluster.hardware.memory_bytes / GIB
    return "" if plan.fits else f"it needs {needed:.0f} GiB by the plan, and the GPU has {room:.0f} GiB"


def plan_of(config: DictConfig, hardware: Hardware, shape: ModelShape, trainer: Any | None = None) -> Plan:
    """The plan of a configuration on these GPUs, with the lengths of its data where there is a trainer."""
    lengths = Lengths(mean=config.data.max_length / 4)
    if trainer is not None:
        lengths = Lengths(mean=float(trainer.train_dataset.lengths.mean()))
    num_gpus = dist.get_world_size()
    return make_plan(config, shape, Cluster(hardware, num_gpus, num_gpus), lengths)


def hardware_here() -> Hardware:
    """The data sheet of the GPU; of an unknown one its memory alone, with an empty `source`."""
    if not torch.cuda.is_available():
        return HARDWARE["cpu"]
    name = torch.cuda.get_device_name()
    known = next((each for key, each in HARDWARE.items() if key.upper() in name.upper()), None)
    total = torch.cuda.get_device_properties(0).total_memory
    return known or replace(HARDWARE["h100"], name=name, source="", memory_bytes=0.94 * total)


def model_shape(config: DictConfig) -> ModelShape:
    """Of the configured model."""
    return shape_of(transformers.AutoConfig.from_pretrained(config.model.partial_pretrain))


def qwen2(shape: Shape, **more: Any) -> Qwen2Config:
    """The configuration of a shape's model."""
    return Qwen2Config(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, vocab_size=shape.vocab,
        tie_word_embeddings=shape.tied, max_position_embeddings=32768, **more,
    )  # fmt: skip


def write_inputs(settings: Settings, name: str) -> None:
    """Random weights in bf16 and chats of different lengths, once for each shape.

    The files of other shapes are removed, because the disk may not hold them all.
    """
    shape, directory = SHAPES[name], directory_of(settings, name)
    for other in directory.parent.glob("shape_*"):
        if other != directory:
            shutil.rmtree(other)
    if directory.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(Path(settings.scratch) / "quickstart/model")
    config = qwen2(shape, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "model")
    save_tokenizer(tokenizer, directory / "model")
    num_chats = 4 * samples_of_step(shape) * settings.num_gpus
    lengths = random.Random(0).choices(range(shape.row // 32, shape.row // 2), k=num_chats)
    tokens_of_text = len(tokenizer(TEXT)["input_ids"])
    chats = [
        [{"role": "user", "content": "go"}, {"role": "assistant", "content": TEXT * (length // tokens_of_text + 1)}]
        for length in lengths
    ]
    pd.DataFrame({"messages": chats}).to_parquet(directory / "chats.parquet")


# Saves


def save(settings: Settings, name: str, *overrides: str) -> None:
    """How long training waits for a save, and how long writing takes."""
    trainer = trainer_of(settings, name, overrides)
    if trainer is None:
        return
    batches = trainer.remaining_batches()
    for _ in range(WARM_UP + 1):
        batch = next(batches)
        step_s = seconds_of(trainer.training_step, batch)
    directory = Path(settings.scratch) / "saved"
    needed = 12 * model_shape(trainer.config).numel
    free = on_rank_zero(lambda: free_bytes(directory.parent))
    if free < 1.2 * needed:
        if dist.get_rank() == 0:
            settings.skip(f"a save needs {needed / GIB:.0f} GiB of disk, and {free / GIB:.0f} GiB are free")
        return
    manager, begun = trainer.checkpoint_manager, time.perf_counter()
    manager.save_checkpoint(str(directory / "global_step_3"), global_step=3)
    stall_s, beside = time.perf_counter() - begun, []
    while all_ranks(manager.is_writing):
        batch = next(batches)
        beside.append(seconds_of(trainer.training_step, batch))
    manager.wait()
    total_s = time.perf_counter() - begun
    dist.barrier()
    if dist.get_rank() == 0:
        num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
        settings.add_row("training waits", stall_s, "s")
        settings.add_row("until the checkpoint is complete", total_s, "s")
        settings.add_row("size", num_bytes / GIB, "GiB", note=f"{num_bytes / total_s / 1e9:.2f} GB/s")
        settings.add_row("step before the save", step_s, "s")
        if beside:
            settings.add_row("step while the save is being written", statistics.median(beside), "s")
        shutil.rmtree(directory)


def all_ranks(value: bool) -> bool:
    """Whether it is true on every rank."""
    flag = torch.tensor(value, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


# The controller


def controller(settings: Settings) -> None:
    """The latency model of a small vision-language model with experts, and its clock against CUDA events."""
    from benchmarks.adaptive_knobs import Bench, made_model

    device, dtype = default_device()
    model = made_model(Path(settings.scratch) / "vlm")
    adapter = load_adapter(model, [2304, 9216, 20736], device=device, dtype=dtype)
    space, bench = adapter.space(1, len(adapter.blocks), [1, 2, 4, 8]), Bench(adapter, new_tokens=8)
    num_configurations, repeats = (12, 1) if settings.tiny else (100, 5)
    found = calibrate(adapter, space, bench.questions(4), num_configurations, repeats, 8)
    settings.add_row("R squared of the latency model", found.r2)
    settings.add_row("90 % of the runs take at most", found.scatter["90"], "x", note="of what it predicts")
    settings.add_row("a decision of the controller", found.deciding_ms, "ms")
    settings.add_row("the full configuration", bench.run(space.full).total_ms, "ms")
    if device != "cuda":
        settings.skip("CUDA events need a GPU")
        return
    rng = random.Random(0)
    configurations = [space.draw(rng) for _ in range(20)]
    ratios = [milliseconds_by_events(bench, each) / bench.run(each).total_ms for each in configurations]
    median = statistics.median(ratios)
    note = f"{min(ratios):.3f} to {max(ratios):.3f}"
    settings.add_row("CUDA events over the controller's clock", median, note=note)
    settings.add_row("distance of that ratio from 1", abs(median - 1), limit=0.1)


def milliseconds_by_events(bench: Bench, configuration: Configuration) -> float:
    """Milliseconds of the model's forward passes in one generation, by CUDA events."""
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(*_: Any) -> None:
        pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        pairs[-1][0].record()

    def end(*_: Any) -> None:
        pairs[-1][1].record()

    with ExitStack() as hooks:
        hooks.callback(bench.adapter.model.register_forward_pre_hook(begin).remove)
        hooks.callback(bench.adapter.model.register_forward_hook(end).remove)
        bench.generate(configuration)
    torch.cuda.synchronize()
    return sum(first.elapsed_time(last) for first, last in pairs)


PARTS = {each.__name__: each for each in (steps, save, controller)}


def main(words: list[str]) -> None:
    """Run a part: the scratch directory, its name, and its arguments."""
    join_ranks()
    PARTS[words[1]](Settings.load(words[0]), *words[2:])
