"""`python -m verl_ext.plan` against reality: memory predicted and measured, setting by setting.

Each setting trains its own random model with this project's trainer under torchrun on CPUs, with FSDP2 and gloo. Two
peaks of each rank are compared with the plan's: `resident`, the growth of the process's resident memory since before
the model was built, and `tensors`, the bytes of live tensors according to torch's allocator. glibc is configured to
return freed tensors immediately; otherwise `resident` would include memory that is no longer used. The prediction gets
no number from the measurement except the share of tokens in the loss.

Step times are compared too, as medians with their range; the speed of a CPU in the hardware table is an assumption.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Results, bench_parser, qwen2_size, write_results
from verl_ext.cli import clean_exit
from verl_ext.console import print_line, progress_bar
from verl_ext.data.prepare import prepare

TARGET = 0.15
"""Target for the relative error of a prediction."""
PLAIN = ("data.packing=false", "model.fused_loss=false", "model.fsdp_config.keep_gathered=false")
"""Features that are off unless a setting enables them."""


@dataclass(frozen=True)
class PlanSetting:
    """A model, its data and its configuration.

    Attributes:
        ranks: number of processes.
        length: tokens of a sample.
        rows: samples of a rank's micro-batch.
        model: dimensions of the model, and its `model_type` if it is not Qwen2.
        micro_batches: micro-batches of a rank's step.
        short_length: tokens of every other sample, which is padded; None if all have the same length.
        overrides: overrides of the configuration.
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
        """Samples of a step, and of the dataset, because all steps are the same."""
        return self.ranks * self.rows * self.micro_batches


CHECKPOINTING = ("model.enable_gradient_checkpointing=true",)
BF16 = ("model.mixed_precision=bf16",)
PACKED = ("data.packing=true", "model.fused_loss=true")
GATHERED = ("model.fsdp_config.keep_gathered=true",)
LORA = ("model.lora_rank=16",)
WIDE = qwen2_size(768, 2048, 8, 12, 32000)
SETTINGS = {
    "two ranks": PlanSetting(2, 512, 4, WIDE),
    "two ranks, checkpointing": PlanSetting(2, 512, 4, WIDE, overrides=CHECKPOINTING),
    "one rank, padded rows": PlanSetting(1, 512, 4, WIDE, short_length=256),
    "two ranks, bf16": PlanSetting(2, 256, 4, qwen2_size(768, 2048, 4, 12, 32000), overrides=BF16),
    "two ranks, two micro-batches, weights stay gathered": PlanSetting(
        2, 256, 2, qwen2_size(1024, 2816, 6, 16, 16000), 2, overrides=GATHERED
    ),
    "two ranks, vocabulary of Qwen2.5": PlanSetting(2, 256, 2, qwen2_size(512, 1408, 4, 8, 152064)),
    "one rank, tied, checkpointing, two micro-batches": PlanSetting(
        1, 512, 4, qwen2_size(1024, 2816, 6, 16, 8192, tied=True), micro_batches=2, overrides=CHECKPOINTING
    ),
    "one rank, one long sample": PlanSetting(1, 2048, 1, qwen2_size(768, 2048, 6, 12, 16000)),
    "one rank, large model, few tokens": PlanSetting(1, 128, 1, qwen2_size(1280, 3456, 8, 20, 32000)),
    "two ranks, packed, fused loss": PlanSetting(2, 512, 4, WIDE, overrides=PACKED),
    "two ranks, packed, fused, checkpointing, two micro-batches, weights stay gathered": PlanSetting(
        2, 512, 4, WIDE, 2, overrides=(*PACKED, "data.max_tokens_per_gpu=2048", *CHECKPOINTING, *GATHERED)
    ),
    "two ranks, LoRA": PlanSetting(2, 512, 4, WIDE, overrides=LORA),
    "two ranks, LoRA, packed, fused": PlanSetting(2, 512, 4, WIDE, overrides=(*LORA, *PACKED)),
    "one rank, LoRA, checkpointing, weights stay gathered": PlanSetting(
        1, 512, 4, WIDE, 2, overrides=(*LORA, *CHECKPOINTING, *GATHERED)
    ),
    "two ranks, small vocabulary": PlanSetting(2, 512, 2, qwen2_size(1024, 2816, 10, 16, 4096), micro_batches=2),
    "two ranks, Gemma 3": PlanSetting(2, 512, 4, {**WIDE, "model_type": "gemma3_text", "head_dim": 64}),
    "two ranks, Gemma 3, bf16, packed, fused": PlanSetting(
        2, 512, 4, {**WIDE, "model_type": "gemma3_text", "head_dim": 64}, overrides=(*BF16, *PACKED)
    ),
    "one rank, Gemma 2, eager attention": PlanSetting(1, 256, 4, {**WIDE, "model_type": "gemma2", "head_dim": 64}),
    "two ranks, Phi-3, checkpointing": PlanSetting(2, 512, 4, {**WIDE, "model_type": "phi3"}, overrides=CHECKPOINTING),
    "one rank, Phi-3, padded rows": PlanSetting(1, 512, 4, {**WIDE, "model_type": "phi3"}, short_length=256),
}
NAMES = f"settings to measure (default: all): {'; '.join(SETTINGS)}"


def table_of(settings: dict[str, Results]) -> str:
    """The results as text."""
    head = f"{'setting':<50}{'predicted':>11}{'resident':>10}{'error':>8}{'tensors':>10}{'error':>8}"
    head += f"{'step, s':>22}{'plan':>8}"
    rows = []
    for name, each in settings.items():
        step = "{:.1f} ({:.1f} to {:.1f})".format(each["step_s"], *each["step_s_range"])
        rows.append(
            f"{name:<50}{each['predicted_gib']:11.3f}{each['resident_gib']:10.3f}{each['resident_error']:8.1%}"
            f"{each['tensors_gib']:10.3f}{each['tensors_error']:8.1%}{step:>22}{each['predicted_step_s']:8.1f}"
        )
    return "\n".join([head, *rows])


def record(found: dict[str, Results], path: Path) -> None:
    """Write results to a file, and keep its results of other settings."""
    previous = json.loads(path.read_text())["settings"] if path.is_file() else {}
    settings = {**previous, **found}
    ordered = {name: settings[name] for name in SETTINGS if name in settings}
    write_results({"target": TARGET, "settings": ordered}, path)


@clean_exit()
def main() -> None:
    """Measure, print and write the results; the file keeps its results of other settings."""
    parser = bench_parser("plan", __doc__, "", "--settings 'two ranks' 'two ranks, bf16' --output FILE.json")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS), metavar="NAME", help=NAMES)
    arguments = parser.parse_args()
    from benchmarks.plan_ranks import compare  # here, because torch takes seconds to import

    found: dict[str, Results] = {}
    with tempfile.TemporaryDirectory(prefix="benchmark_plan_") as name:
        prepare(["quickstart", "--output", f"{name}/quickstart", "--samples", "500"])
        for setting in progress_bar(arguments.settings, desc="measuring", unit="settings"):
            found[setting] = compare(SETTINGS[setting], Path(name))
            if arguments.output is not None:
                record(found, arguments.output)
    print_line(table_of(found))


if __name__ == "__main__":
    main()
