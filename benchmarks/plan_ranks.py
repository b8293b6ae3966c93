"""One setting of `benchmarks.plan`: the plan's prediction, and the measurement of its ranks."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import shutil
import statistics
import time
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.harness import Results, log_row, run_ranks
from benchmarks.plan import PLAIN, TARGET, PlanSetting
from verl_ext.config.schema import to_yaml
from verl_ext.data.batching import TokenBatch
from verl_ext.data.chats import load_chats
from verl_ext.distributed import build_meshes, gather_results, init_process_group, to_local
from verl_ext.files import GIB
from verl_ext.plan.model_shape import empty_model, settle, shape_of
from verl_ext.plan.planner import RunPlan, make_plan
from verl_ext.plan.step_time import HARDWARE, Cluster
from verl_ext.plan.workload import DataLengths
from verl_ext.trainer.device import resolve_device
from verl_ext.trainer.sft import SFTTrainer
from verl_ext.trainer.stages import SFTConfig, load_config, read_config
from verl_ext.trainer.tokenizer import load_tokenizer

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""Tensors of 1 MiB and more get their own mapping, which `free` returns to the system; see mallopt(3)."""
WORDS = "def add(left, right): return left + right\n"
TIMED_STEPS = 5


def sft_config(setting: PlanSetting, data: Path | str, model: Path | str, run_dir: Path | str) -> SFTConfig:
    """The quickstart's recipe with the setting's model and data."""
    values = {
        "prepare": "[]",
        "data.train_files": data,
        "data.val_files": "null",
        "data.max_length": setting.length,
        "data.truncation": "right",
        "data.train_batch_size": setting.samples,
        "data.micro_batch_size_per_gpu": setting.rows,
        "model.partial_pretrain": model,
        "trainer.default_local_dir": run_dir,
        "trainer.total_epochs": TIMED_STEPS + 2,
        "trainer.total_training_steps": TIMED_STEPS + 2,
        "trainer.logger": "[]",
    }
    words = [f"{key}={value}" for key, value in values.items()]
    config = load_config("sft", ["recipe=quickstart", *words, *PLAIN, *setting.overrides])
    assert isinstance(config, SFTConfig)
    return config


def predicted(setting: PlanSetting, config: SFTConfig, loss_fraction: float) -> RunPlan:
    """The plan of the same configuration on the same number of cores."""
    lengths = DataLengths(loss_fraction=loss_fraction, are_equal=setting.short_length is None)
    cluster = Cluster(HARDWARE["cpu"], setting.ranks, setting.ranks)
    model_config = model_config_of(setting)
    settle(config, model_config, is_gpu=False)
    shape = shape_of(model_config, empty_model(model_config, config.model))
    return make_plan(config, shape, cluster, lengths)


def compare(setting: PlanSetting, scratch: Path) -> Results:
    """Predict and measure one setting.

    Args:
        setting: the setting.
        scratch: directory for models, data and runs, with the quickstart's data.

    Raises:
        UserError: the ranks failed.
    """
    config_file = scratch / "config.yaml"
    config = sft_config(setting, write_data(setting, scratch), write_model(setting, scratch), scratch / "run")
    config_file.write_text(to_yaml(config))
    variables = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // setting.ranks, 1)), **ALLOCATOR}
    ranks = run_ranks("plan_ranks:measure", str(config_file), ranks=setting.ranks, torchrun=True, variables=variables)
    loss_fraction = ranks[0]["loss_tokens"] / sum(rows * length for rows, length in ranks[0]["micro_batches"])
    plan = predicted(setting, config, loss_fraction)
    peak = plan.memory.peak_bytes
    resident, tensors = (max(rank[name] for rank in ranks) for name in ("resident_bytes", "tensor_bytes"))
    steps = [max(seconds) for seconds in zip(*(rank["steps_s"] for rank in ranks))]
    return {
        "ranks": setting.ranks,
        "micro_batches": ranks[0]["micro_batches"],
        "loss_fraction": loss_fraction,
        "model": {**setting.model, "parameters": plan.shape.numel},
        "overrides": list(setting.overrides),
        "predicted_gib": peak / GIB,
        "peak_moment": plan.memory.peak_phase,
        "resident_gib": resident / GIB,
        "resident_error": peak / resident - 1,
        "tensors_gib": tensors / GIB,
        "tensors_error": peak / tensors - 1,
        "predicted_parts_gib": {part: value / GIB for part, value in plan.memory.peak.items()},
        "step_s": statistics.median(steps),
        "step_s_range": [min(steps), max(steps)],
        "predicted_step_s": plan.time.total_s,
        "within_target": abs(peak / resident - 1) <= TARGET,
    }


def model_config_of(setting: PlanSetting, **tokens: int) -> transformers.PretrainedConfig:
    """Return the configuration of the model of a setting, with the ids of special tokens."""
    return transformers.AutoConfig.for_model(**{"model_type": "qwen2", "pad_token_id": None, **tokens, **setting.model})


def write_model(setting: PlanSetting, scratch: Path) -> Path:
    """Write a random model of these dimensions; returns its directory."""
    path = scratch / "model"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(scratch / "quickstart/model", path, ignore=shutil.ignore_patterns("*.safetensors"))
    known = json.loads((path / "config.json").read_text())
    tokens = {name: known[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in known}
    config = model_config_of(setting, **tokens)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def write_data(setting: PlanSetting, scratch: Path) -> Path:
    """Write one step's chats: longer than a sample can be, or every other one about `short_length` tokens long."""
    lengths = [setting.length, setting.short_length or setting.length] * (setting.samples // 2) or [setting.length]
    rows = [
        {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]}
        for text in (WORDS * (length // (8 if length == setting.length else 16)) for length in lengths)
    ]
    path = scratch / "train.parquet"
    pd.DataFrame(rows).to_parquet(path)
    return path


# One rank


def measure(config_file: str) -> None:
    """Train with the project's own trainer, and measure this rank's memory; rank 0 logs a row for every rank.

    The first step creates the optimizer's state. The next ones are timed, and the first of them gives the peak of the
    resident set. torch's profiler records the last one, whose allocations give the bytes of live tensors.
    """
    config = read_config(Path(config_file))
    assert isinstance(config, SFTConfig)
    device_name = resolve_device(config)
    init_process_group(device_name)
    tokenizer = load_tokenizer(config)
    datasets = load_chats(config.data, tokenizer)
    warm_up()
    baseline = resident_bytes("VmRSS")
    trainer = SFTTrainer(config, *build_meshes(device_name, 1), tokenizer, *datasets)
    batches = trainer.batches()
    trainer.training_step(next(batches))
    forget_peak()
    steps_s, peak_resident = [], 0
    for _ in range(TIMED_STEPS):
        batch, started = next(batches), time.perf_counter()
        trainer.training_step(batch)
        steps_s.append(time.perf_counter() - started)
        peak_resident = peak_resident or resident_bytes("VmHWM")
    found = {
        "resident_bytes": peak_resident - baseline,
        "tensor_bytes": state_bytes(trainer) + peak_allocated(trainer, next(batches)),
        "steps_s": steps_s,
        "micro_batches": [list(each["input_ids"].shape) for each in batch.micro_batches],
        "loss_tokens": batch.num_loss_tokens,
    }
    for row in gather_results(lambda: found):
        if dist.get_rank() == 0:
            log_row(**row)
    dist.destroy_process_group()


def warm_up() -> None:
    """Load the code and threads of kernels and of gloo before the baseline is read, and return free memory.

    Tokenizing leaves a heap that the model's tensors would reuse, so that they would seem to take no memory.
    """
    torch.nn.Linear(64, 64)(torch.ones(64, 64)).sum().backward()
    dist.all_reduce(torch.ones(1024))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes(name: str) -> int:
    """Resident bytes in /proc/self/status: VmRSS is the current value, VmHWM the peak since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def forget_peak() -> None:
    """Reset VmHWM to the current value (see clear_refs in proc(5))."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def peak_allocated(trainer: SFTTrainer, batch: TokenBatch) -> int:
    """The peak of tensor bytes in a step, beyond those live at its start, which no step frees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        trainer.training_step(batch)
    assert recorded.profiler is not None
    events = [each for each in recorded.profiler.kineto_results.events() if each.name() == "[memory]"]
    total = peak = 0
    for each in sorted(events, key=lambda each: each.start_ns()):
        total += each.nbytes()
        peak = max(peak, total)
    return peak


def state_bytes(trainer: SFTTrainer) -> int:
    """Bytes of this rank's parameters and optimizer state."""
    state = [tensor for each in trainer.optimizer.state.values() for tensor in each.values() if torch.is_tensor(tensor)]
    tensors = [*trainer.fsdp_model.parameters(), *state]
    return sum(each.nbytes for each in map(to_local, tensors))
