"""`python -m verl_ext.plan` against what really happens: memory predicted and measured, setting by setting.

    python -m benchmarks.plan [--settings NAME ...] [--output FILE.json]

Each setting trains a random model of its own with this project's trainer, by torchrun, on CPUs: FSDP2, gloo, three
steps. Two figures of each rank's peak are compared with the plan's: `resident`, what the process holds of the machine's
memory above what it held before the model was made, and `tensors`, the bytes of live tensors by torch's allocator.
glibc is told to give freed tensors back at once, else the first would be what was ever held, not what is. The
prediction gets no number from the measurement but the data's share of learnt tokens.

Step times are told beside the plan's, too; a CPU's speed in the table of hardware is an assumption.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import transformers
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from benchmarks.about import about
from verl_ext.config.compose import compose_config
from verl_ext.data.prepare import prepare
from verl_ext.errors import UserError, exit_on_user_error
from verl_ext.plan.hardware import find_hardware
from verl_ext.plan.links import Cluster
from verl_ext.plan.plan import GIB, Plan, make_plan
from verl_ext.plan.shape import ModelShape, shape_of
from verl_ext.plan.workload import Lengths

ROOT = Path(__file__).resolve().parents[1]
TARGET = 0.15
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}
"""A tensor of 1 MiB and more is a mapping of its own, which `free` returns to the system; mallopt(3)."""
PLAIN = ("data.packing=false", "model.fused_loss=false", "model.fsdp_config.keep_gathered=false")
"""What a setting does not do unless it says so."""
WORDS = "def add(left, right): return left + right\n"


@dataclass(frozen=True)
class Setting:
    """What is trained.

    Attributes:
        ranks: processes.
        length: tokens of a sample.
        rows: samples of a rank's micro-batch, and `micro_batches` of them in its step.
        model: dimensions of a Qwen2 model.
        short_length: tokens of every other sample, where there are such; they are padded.
        overrides: of the configuration.
    """

    ranks: int
    length: int
    rows: int
    model: dict[str, Any]
    micro_batches: int = 1
    short_length: int | None = None
    overrides: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """Of a step, and of the data set: every step is the same."""
        return self.ranks * self.rows * self.micro_batches


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, vocab: int, tied: bool = False) -> dict[str, Any]:
    """Dimensions of a model with four heads of keys and values."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }


CHECKPOINTING = ("model.enable_gradient_checkpointing=true",)
WIDE = qwen2(768, 2048, 8, 12, 32000)
SETTINGS = {
    "two ranks": Setting(2, 512, 4, WIDE),
    "two ranks, checkpointing": Setting(2, 512, 4, WIDE, overrides=CHECKPOINTING),
    "one rank, padded rows": Setting(1, 512, 4, WIDE, short_length=256),
    "two ranks, bf16": Setting(2, 256, 4, qwen2(768, 2048, 4, 12, 32000), overrides=("model.mixed_precision=bf16",)),
    "two ranks, two micro-batches, weights stay gathered": Setting(
        2, 256, 2, qwen2(1024, 2816, 6, 16, 16000), 2, overrides=("model.fsdp_config.keep_gathered=true",)
    ),
    "two ranks, vocabulary of Qwen2.5": Setting(2, 256, 2, qwen2(512, 1408, 4, 8, 152064)),
    "one rank, tied, checkpointing, two micro-batches": Setting(
        1, 512, 4, qwen2(1024, 2816, 6, 16, 8192, tied=True), micro_batches=2, overrides=CHECKPOINTING
    ),
    "one rank, one long sample": Setting(1, 2048, 1, qwen2(768, 2048, 6, 12, 16000)),
    "one rank, large model, few tokens": Setting(1, 128, 1, qwen2(1280, 3456, 8, 20, 32000)),
    "two ranks, packed, fused loss": Setting(2, 512, 4, WIDE, overrides=("data.packing=true", "model.fused_loss=true")),
    "two ranks, packed, fused, checkpointing, two micro-batches, weights stay gathered": Setting(
        2,
        512,
        4,
        WIDE,
        2,
        overrides=(
            *("data.packing=true", "model.fused_loss=true", "data.max_tokens_per_gpu=2048", *CHECKPOINTING),
            "model.fsdp_config.keep_gathered=true",
        ),
    ),
    "two ranks, small vocabulary": Setting(2, 512, 2, qwen2(1024, 2816, 10, 16, 4096), micro_batches=2),
}


def sft_config(setting: Setting, data: Path | str, model: Path | str, run_dir: Path | str) -> DictConfig:
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
    return compose_config("sft", ["recipe=quickstart", *words, *PLAIN, *setting.overrides])


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

    def measured(self, setting: Setting, config: DictConfig) -> list[dict[str, Any]]:
        """What every rank found.

        Raises:
            UserError: the ranks failed.
        """
        OmegaConf.save(config, self.scratch / "config.yaml")
        output = self.scratch / "ranks.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={setting.ranks}"]
        command += ["-m", "benchmarks.plan_rank", str(self.scratch / "config.yaml"), str(output)]
        threads = str(max((os.cpu_count() or 1) // setting.ranks, 1))
        environment = {**os.environ, **ALLOCATOR, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            reasons = [line for line in done.stderr.splitlines() if "Error" in line] or done.stderr.splitlines()[-1:]
            raise UserError(f"the ranks failed: {reasons[0]}")
        return json.loads(output.read_text())


def predicted(setting: Setting, config: DictConfig, loss_share: float, shape: ModelShape) -> Plan:
    """The plan of the same configuration on as many cores."""
    lengths = Lengths(learnt_share=loss_share, are_equal=setting.short_length is None)
    return make_plan(config, shape, Cluster(find_hardware("cpu"), setting.ranks, setting.ranks), lengths)


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
        "peak_moment": plan.memory.peak_moment,
        "resident_gib": resident / GIB,
        "resident_error": plan.memory.peak_bytes / resident - 1,
        "tensors_gib": tensors / GIB,
        "tensors_error": plan.memory.peak_bytes / tensors - 1,
        "predicted_parts_gib": {part: value / GIB for part, value in plan.memory.peak.items()},
        "step_s": max(rank["step_s"] for rank in ranks),
        "predicted_step_s": plan.time.total_s,
        "within_target": abs(plan.memory.peak_bytes / resident - 1) <= TARGET,
    }


def table_of(settings: dict[str, dict[str, Any]]) -> str:
    """The figures as text."""
    head = (
        f"{'setting':<50}{'predicted':>11}{'resident':>10}{'error':>8}{'tensors':>10}{'error':>8}{'step':>8}{'plan':>8}"
    )
    rows = [
        f"{name:<50}{each['predicted_gib']:11.3f}{each['resident_gib']:10.3f}{each['resident_error']:8.1%}"
        f"{each['tensors_gib']:10.3f}{each['tensors_error']:8.1%}{each['step_s']:8.1f}{each['predicted_step_s']:8.1f}"
        for name, each in settings.items()
    ]
    return "\n".join([head, *rows])


@exit_on_user_error()
def main() -> None:
    """Measure, print the figures, and put them into the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME")
    parser.add_argument("--output", type=Path, help="put the figures into this JSON file, beside those it has")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        for setting in tqdm(arguments.settings, unit="setting"):
            found[setting] = compare(bench, SETTINGS[setting])
            if arguments.output is not None:
                record(found, arguments.output)
    print(table_of(found))


def record(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Put figures into a file, beside those that it has of other settings."""
    former = json.loads(path.read_text())["settings"] if path.is_file() else {}
    settings = {**former, **found}
    figures = {
        **about("torch", "transformers"),
        "target": TARGET,
        "settings": {name: settings[name] for name in SETTINGS if name in settings},
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
