"""One setting of `benchmarks.plan`: what the plan says of it, and what its ranks take."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import transformers

from benchmarks.plan_settings import PLAIN, TARGET, Setting
from benchmarks.running import run
from verl_ext.config.schema import to_yaml
from verl_ext.data.prepare import prepare
from verl_ext.files import GIB
from verl_ext.plan.model_shape import ModelShape, shape_of
from verl_ext.plan.planner import RunPlan, make_plan
from verl_ext.plan.step_time import HARDWARE, Cluster
from verl_ext.plan.workload import DataLengths
from verl_ext.trainer.stages import SFTConfig, load_config

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""A tensor of 1 MiB and more is a mapping of its own, which `free` returns to the system; mallopt(3)."""
WORDS = "def add(left, right): return left + right\n"


def sft_config(setting: Setting, data: Path | str, model: Path | str, run_dir: Path | str) -> SFTConfig:
    """The quickstart's recipe with the setting's model and data."""
    settings = {
        "prepare": "[]",
        "data.train_files": data,
        "data.val_files": "null",
        "data.max_length": setting.length,
        "data.truncation": "right",
        "data.train_batch_size": setting.samples,
        "data.micro_batch_size_per_gpu": setting.rows,
        "model.partial_pretrain": model,
        "trainer.default_local_dir": run_dir,
        "trainer.total_epochs": 3,
        "trainer.total_training_steps": 3,
        "trainer.logger": "[]",
    }
    words = [f"{key}={value}" for key, value in settings.items()]
    config = load_config("sft", ["recipe=quickstart", *words, *PLAIN, *setting.overrides])
    assert isinstance(config, SFTConfig)
    return config


@dataclass
class Bench:
    """Where the files of a run lie.

    Attributes:
        scratch: directory of the run.
        quickstart: whose tokenizer every model has.
    """

    scratch: Path
    quickstart: Path = field(init=False)

    def __post_init__(self) -> None:
        self.quickstart = self.scratch / "quickstart"
        prepare(["quickstart", "--output", str(self.quickstart), "--samples", "500"])

    def model(self, setting: Setting) -> Path:
        """A random model of these dimensions, with weights on the disk as a trainer loads them."""
        path = self.scratch / "model"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(self.quickstart / "model", path, ignore=shutil.ignore_patterns("*.safetensors"))
        known = json.loads((path / "config.json").read_text())
        tokens = {name: known[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in known}
        config = transformers.Qwen2Config(**setting.model, **tokens)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    def data(self, setting: Setting) -> Path:
        """One step's chats: longer than a sample may be, every other one about as short as the setting says."""
        lengths = [setting.length, setting.short_length or setting.length] * (setting.samples // 2)
        lengths = lengths or [setting.length]
        rows = [
            {"messages": [{"role": "user", "content": "go"}, {"role": "assistant", "content": text}]}
            for text in (WORDS * (length // (8 if length == setting.length else 16)) for length in lengths)
        ]
        pd.DataFrame(rows).to_parquet(self.scratch / "train.parquet")
        return self.scratch / "train.parquet"

    def measured(self, setting: Setting, config: SFTConfig) -> list[dict[str, Any]]:
        """What every rank found.

        Raises:
            UserError: the ranks failed.
        """
        (self.scratch / "config.yaml").write_text(to_yaml(config))
        output = self.scratch / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.ranks}"]
        command += ["-m", "benchmarks.side", "plan_rank", str(self.scratch / "config.yaml"), str(output)]
        threads = str(max((os.cpu_count() or 1) // setting.ranks, 1))
        run(command, OMP_NUM_THREADS=threads, **ALLOCATOR)
        return json.loads(output.read_text())


def predicted(setting: Setting, config: SFTConfig, loss_share: float, shape: ModelShape) -> RunPlan:
    """The plan of the same configuration on as many cores."""
    lengths = DataLengths(loss_share=loss_share, are_equal=setting.short_length is None)
    return make_plan(config, shape, Cluster(HARDWARE["cpu"], setting.ranks, setting.ranks), lengths)


def compare(bench: Bench, setting: Setting) -> dict[str, Any]:
    """One setting's figures."""
    config = sft_config(setting, bench.data(setting), bench.model(setting), bench.scratch / "run")
    ranks = bench.measured(setting, config)
    loss_share = ranks[0]["loss_tokens"] / sum(rows * length for rows, length in ranks[0]["micro_batches"])
    shape = shape_of(transformers.AutoConfig.from_pretrained(config.model.partial_pretrain))
    plan = predicted(setting, config, loss_share, shape)
    resident, tensors = (max(rank[name] for rank in ranks) for name in ("resident_bytes", "tensor_bytes"))
    return {
        "ranks": setting.ranks,
        "micro_batches": ranks[0]["micro_batches"],
        "loss_share": loss_share,
        "model": {**setting.model, "parameters": shape.numel},
        "overrides": list(setting.overrides),
        "predicted_gib": plan.memory.peak_bytes / GIB,
        "peak_moment": plan.memory.peak_phase,
        "resident_gib": resident / GIB,
        "resident_error": plan.memory.peak_bytes / resident - 1,
        "tensors_gib": tensors / GIB,
        "tensors_error": plan.memory.peak_bytes / tensors - 1,
        "predicted_parts_gib": {part: value / GIB for part, value in plan.memory.peak.items()},
        "step_s": max(rank["step_s"] for rank in ranks),
        "predicted_step_s": plan.time.total_s,
        "within_target": abs(plan.memory.peak_bytes / resident - 1) <= TARGET,
    }
