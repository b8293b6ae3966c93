"""Parts of `benchmarks.gpu_check` that measure time and memory: training steps, saves, and the controller's model."""

from __future__ import annotations

import gc
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from benchmarks.gpu_check import GPUCheckSettings
from benchmarks.gpu_trainer import build_trainer, join_ranks, sft_config
from benchmarks.harness import qwen2_size
from verl_ext.checkpoint.inspection import size_on_disk
from verl_ext.controller.latency import calibrate
from verl_ext.controller.space import Configuration
from verl_ext.controller.vlm import default_device, load_adapter
from verl_ext.data.batching import TokenBatch
from verl_ext.distributed import gather_results, on_rank_zero
from verl_ext.files import GIB, free_bytes
from verl_ext.model_files import save_tokenizer
from verl_ext.plan.model_shape import ModelShape, empty_model, shape_of
from verl_ext.plan.planner import RunPlan, make_plan
from verl_ext.plan.step_time import HARDWARE, Cluster, Hardware
from verl_ext.plan.workload import DataLengths
from verl_ext.trainer.config import ModelConfig
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig

if TYPE_CHECKING:
    from benchmarks.adaptive_knobs import KnobRunner

WARM_UP = 2
"""Number of steps that are not measured."""
ROW = 8192
"""Tokens of a micro-batch."""
SAMPLES_OF_ROW = 4
"""Samples per row, all of the same length, so that every row is full and all steps have equal work."""
CHECKPOINTING = "model.enable_gradient_checkpointing=true"
LAYOUTS = [
    (f"data.max_tokens_per_gpu={row}", f"model.fsdp_config.keep_gathered={gathered}")
    for gathered in ("true", "false")
    for row in (16384, 8192, 4096, 2048)
]
"""Overrides that need less and less memory; the samples of a shape fill rows of each size."""
ROOM = 0.97
"""Share of the GPU's memory for the plan's prediction; the rest is for the CUDA context and fragmentation."""
KERNELS = {
    "attention": ("flash", "fmha"),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma"),
    "compiled kernels": ("triton",),
    "copies and casts": ("Memcpy", "Memset", "copy", "Copy", "CatArray", "chunk_cat", "split_with_sizes"),
    "optimizer": ("adam", "Adam"),
}
"""Kinds of kernels by words in their names; the first that matches counts."""
NOTED_KERNELS = 4
TEXT = "def add(left, right): return left + right\n"


@dataclass(frozen=True)
class StepShape:
    """A Qwen2 model and the size of its steps.

    Attributes:
        model: arguments of `Qwen2Config`.
        micro_batches: micro-batches of a step on one rank.
        row: tokens of a micro-batch.
        steps: number of steps, including the warm-up.
    """

    model: Mapping[str, Any]
    micro_batches: int = 4
    row: int = ROW
    steps: int = 8

    @property
    def samples(self) -> int:
        """Samples of a step on one rank."""
        return SAMPLES_OF_ROW * self.micro_batches

    @property
    def length(self) -> int:
        """Tokens of a sample."""
        return self.row // SAMPLES_OF_ROW

    def dimensions(self, settings: ModelConfig | None = None) -> ModelShape:
        """The model's shape, the input of the plan, with the LoRA adapters of `settings`."""
        config = Qwen2Config(**self.model)
        return shape_of(config, empty_model(config, settings))


SHAPES = {
    "tiny": StepShape(qwen2_size(64, 128, 2, 4, 2048, kv_heads=2, tied=True), micro_batches=2, row=512, steps=4),
    "1.5b": StepShape(qwen2_size(1536, 8960, 28, 12, 151936, kv_heads=2, tied=True)),
    "3b": StepShape(qwen2_size(2048, 11008, 36, 16, 151936, kv_heads=2, tied=True), micro_batches=8, row=4096),
    "7b": StepShape(qwen2_size(3584, 18944, 28, 28, 152064), micro_batches=8, row=4096, steps=6),
}
"""The shapes of Qwen2.5 by name, and a tiny one for the CPU."""


# Training steps


def steps(settings: GPUCheckSettings, name: str, *overrides: str) -> None:
    """Measure seconds, MFU and peak memory of training steps."""
    trainer = trainer_of(settings, name, overrides)
    if trainer is None:
        return
    batches, shape = trainer.batches(), SHAPES[name]
    times = [step_s(trainer, next(batches)) for _ in range(WARM_UP)]
    with sampled_clocks() as clocks:
        times += [step_s(trainer, next(batches)) for _ in range(shape.steps - WARM_UP)]
    if dist.get_rank() == 0:
        report(settings, trainer, shape, times)
        if clocks:
            note = f"{min(clocks):.0f} to {max(clocks):.0f}; lower if power or heat limits it"
            settings.add_row("clock", statistics.median(clocks), "% of max", note=note)
    if trainer.device_name == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            seconds = step_s(trainer, next(batches))
        if dist.get_rank() == 0:
            report_kernels(settings, profile, seconds)


def report(settings: GPUCheckSettings, trainer: SFTTrainer, shape: StepShape, times: Sequence[float]) -> None:
    """Add the rows of a run.

    MFU counts 6 FLOPs for each token and each parameter that it is multiplied by (Kaplan et al. 2020, arXiv
    2001.08361, table 1), or 4 with LoRA, whose frozen weights have no gradients. With attention, it adds 12 x layers x
    width of the heads for each pair of tokens, of which causal attention computes half.

    Args:
        settings: settings of the check.
        trainer: trainer that has done the steps.
        shape: shape of its model.
        times: seconds of each step.
    """
    config, hardware, model = trainer.config, hardware_here(), shape.dimensions()
    assert isinstance(config, SFTConfig)
    kept, tokens = times[WARM_UP:], shape.samples * settings.num_gpus * shape.length
    rate = tokens / statistics.median(kept)
    settings.add_row("step", statistics.median(kept), "s", note=f"{min(kept):.3f} to {max(kept):.3f}")
    settings.add_row("first step", times[0], "s")
    settings.add_row("throughput", rate, "tokens/s", note=f"{tokens} tokens a step, samples of {shape.length}")
    settings.add_row("tokens of a row", config.data.max_tokens_per_gpu or 0, note=gathering(trainer))
    by_lora = config.model.uses_lora
    if hardware.name in HARDWARE:
        dense = (4 if by_lora else 6) * model.matmul_numel * rate
        attention = 6 * model.num_layers * model.num_heads * model.head_dim * shape.length * rate
        peak = hardware.flops * dist.get_world_size()
        what = "MFU by 4N" if by_lora else "MFU by 6N"
        settings.add_row(what, 100 * dense / peak, "%")
        settings.add_row(f"{what} and attention", 100 * (dense + attention) / peak, "%")
    allocated = torch.cuda.max_memory_allocated() if trainer.device_name == "cuda" else None
    predicted = plan_of(config, shape).memory.peak_bytes
    settings.add_row("peak memory by the plan", predicted / GIB, "GiB")
    if allocated is not None:
        settings.add_row("plan over allocated memory", predicted / allocated)
        settings.add_row("peak of allocated memory", allocated / GIB, "GiB")
        settings.add_row("peak of reserved memory", torch.cuda.max_memory_reserved() / GIB, "GiB")


def report_kernels(settings: GPUCheckSettings, profile: torch.profiler.profile, seconds: float) -> None:
    """Add the seconds of a profiled step by kind of kernel, with the largest kernels of each kind as a note."""
    times: dict[str, dict[str, float]] = {kind: {} for kind in (*KERNELS, "other kernels")}
    for event in profile.key_averages():
        kind = next((kind for kind, words in KERNELS.items() if any(word in event.key for word in words)), None)
        times[kind or "other kernels"][event.key] = event.self_device_time_total / 1e6
    for kind, kernels in times.items():
        largest = sorted(kernels.items(), key=lambda item: -item[1])[:NOTED_KERNELS]
        note = ", ".join(f"{name[:40]} {value:.3f}" for name, value in largest)
        settings.add_row(f"profiled step: {kind}", sum(kernels.values()), "s", note=note)
    busy = sum(value for kernels in times.values() for value in kernels.values())
    settings.add_row("profiled step: idle", seconds - busy, "s", note=f"of {seconds:.3f} s")


@contextmanager
def sampled_clocks() -> Iterator[list[float]]:
    """Sample the clocks of all GPUs, in percent of their maximum, while the block runs; empty without nvidia-smi."""
    samples: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.max.sm", "--format=csv,noheader,nounits", "-lms", "200"]
    process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
    try:
        yield samples
    finally:
        process.terminate()
        rows = [line.replace(" ", "").split(",") for line in process.communicate()[0].splitlines()]
        # a GPU may not report its clock, and the last row may be cut off
        samples += [100 * int(row[0]) / int(row[1]) for row in rows if len(row) == 2 and all(map(str.isdecimal, row))]


def step_s(trainer: SFTTrainer, batch: TokenBatch) -> float:
    """Seconds of a training step until the GPU has finished."""
    start = time.perf_counter()
    trainer.training_step(batch)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def trainer_of(settings: GPUCheckSettings, name: str, overrides: Sequence[str]) -> SFTTrainer | None:
    """A trainer of a shape; None, with a row for the reason, if the shape does not fit into memory or on the disk.

    Takes the first of `LAYOUTS` that fits according to the plan, else gradient checkpointing.
    """
    join_ranks()
    shape, config = SHAPES[name], config_of(settings, name, overrides)
    if torch.cuda.is_available():
        tried = [config_of(settings, name, [*overrides, *layout]) for layout in (*LAYOUTS, (CHECKPOINTING,))]
        config = next((each for each in tried if not why_not(each, shape)), config)
    reason = on_rank_zero(lambda: why_not(config, shape) or no_room(settings, name))
    if reason:
        if dist.get_rank() == 0:
            settings.skip(reason)
        return None
    on_rank_zero(lambda: write_inputs(settings, name))
    trainer = build_trainer(config, SFTTrainer)
    if trainer.device_name == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # free what loading used, so that the peaks are those of the steps
        torch.cuda.reset_peak_memory_stats()
    return trainer


def why_not(config: SFTConfig, shape: StepShape) -> str:
    """Why a shape does not fit according to the plan; empty if it fits, and on the CPU."""
    if not torch.cuda.is_available():
        return ""
    needed = plan_of(config, shape).memory.peak_bytes / GIB
    room = ROOM * torch.cuda.get_device_properties(0).total_memory / GIB
    return "" if needed <= room else f"the plan predicts {needed:.0f} GiB, and {room:.0f} GiB of the GPU are used"


def gathering(trainer: SFTTrainer) -> str:
    """Whether weights stay gathered between micro-batches."""
    return "gathered once per step" if trainer.reshard_policy.keeps_gathered else "gathered for every micro-batch"


def plan_of(config: SFTConfig, shape: StepShape) -> RunPlan:
    """The plan of a configuration on these GPUs; all samples have the largest length."""
    num_gpus = dist.get_world_size()
    cluster = Cluster(hardware_here(), num_gpus, num_gpus)
    return make_plan(config, shape.dimensions(config.model), cluster, DataLengths(are_equal=True))


def hardware_here() -> Hardware:
    """The GPU's data sheet; for an unknown GPU, only its memory is known."""
    if not torch.cuda.is_available():
        return HARDWARE["cpu"]
    name = torch.cuda.get_device_name()
    known = next((each for key, each in HARDWARE.items() if key.upper() in name.upper()), None)
    total = torch.cuda.get_device_properties(0).total_memory
    return known or replace(HARDWARE["h100"], name=name, memory_bytes=0.94 * total)


def no_room(settings: GPUCheckSettings, name: str) -> str:
    """Why the disk has no room for a shape's weights; empty if it has room."""
    directory, needed = directory_of(settings, name), 1.2 * 2 * SHAPES[name].dimensions().numel
    free = free_bytes(directory.parent)
    if directory.exists() or free > needed:
        return ""
    return f"its weights need {needed / GIB:.0f} GiB of disk, and {free / GIB:.0f} GiB are free"


def directory_of(settings: GPUCheckSettings, name: str) -> Path:
    """Directory of a shape's weights and chats."""
    return Path(settings.scratch) / f"shape_{name}"


def config_of(settings: GPUCheckSettings, name: str, overrides: Sequence[str]) -> SFTConfig:
    """The configuration of a shape."""
    shape, directory = SHAPES[name], directory_of(settings, name)
    words = [
        f"data.train_files={directory / 'chats.parquet'}",
        f"data.max_length={shape.length}",
        "data.truncation=right",
        f"data.max_tokens_per_gpu={shape.row}",
        f"data.train_batch_size={shape.samples * settings.num_gpus}",
        "model.mixed_precision=auto",
        "optim.lr=1e-5",
    ]
    return sft_config(settings, directory / "model", *words, *overrides)


def write_inputs(settings: GPUCheckSettings, name: str) -> None:
    """Write random weights in bf16, and chats that `data.max_length` truncates to one length, once for each shape.

    The files of other shapes are removed, because the disk may not hold them all.
    """
    shape, directory = SHAPES[name], directory_of(settings, name)
    for other in directory.parent.glob("shape_*"):
        if other != directory:
            shutil.rmtree(other)
    if directory.exists():
        return
    tokenizer = AutoTokenizer.from_pretrained(Path(settings.scratch) / "quickstart/model")
    config = Qwen2Config(**shape.model, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory / "model")
    save_tokenizer(tokenizer, directory / "model")
    if torch.cuda.is_available():
        del model
        torch.cuda.empty_cache()
    text = TEXT * (shape.length // len(tokenizer(TEXT)["input_ids"]) + 1)
    chats = [
        [{"role": "user", "content": str(number)}, {"role": "assistant", "content": text}]
        for number in range(shape.samples * settings.num_gpus)
    ]
    pd.DataFrame({"messages": chats}).to_parquet(directory / "chats.parquet")


# Saves


def save(settings: GPUCheckSettings, name: str, *overrides: str) -> None:
    """Measure how long training waits for a save, plain and asynchronous, and how long writing takes."""
    trainer = trainer_of(settings, name, overrides)
    if trainer is None:
        return
    directory = Path(settings.scratch) / "saved"
    assert isinstance(trainer.config, SFTConfig)
    needed = plan_of(trainer.config, SHAPES[name]).disk.checkpoint_bytes
    free = on_rank_zero(lambda: free_bytes(directory.parent))
    if free < 1.1 * needed:
        if dist.get_rank() == 0:
            settings.skip(f"a save needs {needed / GIB:.0f} GiB of disk, and {free / GIB:.0f} GiB are free")
        return
    batches = trainer.batches()
    before = [step_s(trainer, next(batches)) for _ in range(WARM_UP + 1)][-1]
    manager = trainer.checkpoint_manager
    in_background = manager.config
    manager.config = replace(in_background, async_save=False)
    plain = save_once(trainer, directory, batches)
    manager.config = in_background
    save_once(trainer, directory, batches)  # the first allocates the buffers of all others
    asynchronous = save_once(trainer, directory, batches)
    if dist.get_rank() == 0:
        settings.add_row("step", before, "s")
        settings.add_row("size", plain.num_bytes / GIB, "GiB")
        for name, saved in (("plain", plain), ("asynchronous", asynchronous)):
            settings.add_row(f"{name}: training waits", saved.stall_s, "s")
            rate = f"{saved.num_bytes / saved.total_s / 1e9:.2f} GB/s"
            settings.add_row(f"{name}: until the checkpoint is complete", saved.total_s, "s", note=rate)
        if asynchronous.steps_s:
            settings.add_row("asynchronous: step meanwhile", statistics.median(asynchronous.steps_s), "s")


@dataclass(frozen=True)
class SaveTimes:
    """One save.

    Attributes:
        stall_s: seconds that training waited.
        total_s: seconds until the checkpoint was complete.
        num_bytes: size of its files.
        steps_s: seconds of each step meanwhile.
    """

    stall_s: float
    total_s: float
    num_bytes: int
    steps_s: list[float]


def save_once(trainer: SFTTrainer, directory: Path, batches: Iterator[TokenBatch]) -> SaveTimes:
    """Save, train until the checkpoint is complete, and remove it; collective."""
    manager, begun, steps_s = trainer.checkpoint_manager, time.perf_counter(), []
    path = directory / f"global_step_{trainer.global_step}"
    manager.save_checkpoint(str(path), global_step=trainer.global_step)
    stall_s = time.perf_counter() - begun
    while all(gather_results(lambda: manager.is_writing)):  # so that all ranks do the same number of steps
        steps_s.append(step_s(trainer, next(batches)))
    manager.wait()
    total_s = time.perf_counter() - begun
    dist.barrier()
    num_bytes = size_on_disk(path)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(directory)
    return SaveTimes(stall_s, total_s, num_bytes, steps_s)


# The controller


def controller(settings: GPUCheckSettings) -> None:
    """Measure the latency model of a small vision-language model with experts, and check its clock with CUDA events."""
    from benchmarks.adaptive_knobs import KnobRunner, make_vlm

    device, dtype = default_device()
    model = make_vlm(Path(settings.scratch) / "vlm")
    adapter = load_adapter(model, [2304, 9216, 20736], device=device, dtype=dtype)
    space, runner = adapter.space(1, len(adapter.blocks), [1, 2, 4, 8]), KnobRunner(adapter, new_tokens=8)
    if device == "cuda":
        rng = random.Random(0)
        configurations = [space.sample(rng) for _ in range(20)]
        for each in configurations:
            runner.run(each)
        ratios = [milliseconds_by_events(runner, each) / runner.run(each).total_ms for each in configurations]
        median = statistics.median(ratios)
        note = f"{min(ratios):.3f} to {max(ratios):.3f}"
        settings.add_row("CUDA events over the controller's clock", median, note=note)
        settings.add_row("distance of that ratio from 1", abs(median - 1), limit=0.1)
    else:
        settings.skip("CUDA events need a GPU")
    num_configurations, repeats = (12, 1) if settings.tiny else (40, 3)
    found = calibrate(adapter, space, runner.questions(4), num_configurations, repeats, 8)
    settings.add_row("R squared of the latency model", found.r2)
    settings.add_row("90 % of the runs take at most", found.scatter["90"], "x", note="of what it predicts")
    settings.add_row("a decision of the controller", found.deciding_ms, "ms")
    settings.add_row("the full configuration", runner.run(space.full).total_ms, "ms")


def milliseconds_by_events(runner: KnobRunner, configuration: Configuration) -> float:
    """Milliseconds of the model's forward passes in one generation, by CUDA events."""
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(*_: object) -> None:
        pairs.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
        pairs[-1][0].record()

    def end(*_: object) -> None:
        pairs[-1][1].record()

    with ExitStack() as hooks:
        hooks.callback(runner.adapter.model.register_forward_pre_hook(begin).remove)
        hooks.callback(runner.adapter.model.register_forward_hook(end).remove)
        runner.generate(configuration)
    torch.cuda.synchronize()
    return sum(first.elapsed_time(last) for first, last in pairs)
