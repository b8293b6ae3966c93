"""`python -m verl_ext.plan recipe=NAME gpus=8 [key=value ...]`: predicts memory, step time and disk use."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from verl_ext.cli import FAILURES, CommandParser, clean_exit, definitions
from verl_ext.commands import program
from verl_ext.config.schema import keys, setting
from verl_ext.console import markdown_table, print_line
from verl_ext.errors import UserError
from verl_ext.files import GIB
from verl_ext.suggestions import meant_key

if TYPE_CHECKING:
    from verl_ext.plan.planner import RunPlan

TOP_LEVEL = ("recipe", "prepare", "use_remove_padding", "ulysses_sequence_parallel_size")
"""Top-level keys of the configuration."""


@dataclass(kw_only=True)
class PlanOptions:
    """Options of the command; all other arguments are overrides of the configuration."""

    gpus: list[int] = setting([8], "GPU counts, such as 8 or 8,64,512 (default: 8)", ge=1, le=1_000_000)
    hardware: Literal["h100", "h200", "a100", "cpu"] = setting(
        "h100", "h100, h200, a100, or cpu: one core of a Xeon per rank (default: h100)"
    )
    gpus_per_node: int = setting(8, "GPUs that share a node (default: 8)", ge=1, le=1_000_000)
    stage: Literal["sft", "grpo"] | None = setting(None, "sft or grpo (default: sft, unless only grpo has the recipe)")
    mfu: float | None = setting(
        None, "fraction of peak FLOP/s that compute reaches (default: assumed per hardware)", gt=0, le=1
    )
    mean_length: float | None = setting(None, "mean tokens per sample (default: the longest possible)", gt=0)
    loss_token_fraction: float = setting(
        1.0, "sft: fraction of a sample's tokens that are in the loss (default: 1)", gt=0, le=1
    )
    disk_gbps: float | None = setting(
        None,
        "GB per second that all ranks together write to the disk (default: 1, which a 10 Gbit/s link to shared storage "
        "allows)",
        gt=0,
    )

    def check(self) -> None:
        """Refuse an empty list of GPUs."""
        if not self.gpus:
            raise UserError("gpus is empty; specify one or more GPU counts, such as 8,64,512")

    @classmethod
    def parse(cls, words: Sequence[str]) -> tuple[PlanOptions, list[str]]:
        """Split the arguments into options of the command and overrides of the configuration.

        Raises:
            UserError: an option has an invalid value or is misspelled.
        """
        from verl_ext.config.compose import Composer  # here, because it imports hydra

        known = keys(cls)
        pairs = [word.partition("=") for word in words]
        for key, equals, value in pairs:
            meant = meant_key(key, known) if equals and "." not in key and key not in (*known, *TOP_LEVEL) else None
            if meant == "hardware" and value[:1].isdigit():
                meant = "gpus"
            if meant is not None:
                raise UserError(f"there is no setting '{key}'; did you mean {meant}={value}?")
        own = {key: value for key, equals, value in pairs if equals and key in known}
        if "gpus" in own:
            own["gpus"] = f"[{own['gpus'].strip('[]')}]"
        composer = Composer(cls, extensible=False)
        composer.add_overrides(f"{key}={value}" for key, value in own.items())
        return composer.build(), [word for word, (key, _, _) in zip(words, pairs) if key not in own]


def known_words(words: Sequence[str]) -> list[str]:
    """Return the options of the command and the keys of the configuration, for suggestions."""
    from verl_ext.trainer.stages import known_keys  # here, because it imports hydra

    words = [word for word in words if word.startswith(("recipe=", "stage="))]
    stage = next((word.removeprefix("stage=") for word in words if word.startswith("stage=")), None)
    return [*keys(PlanOptions), *known_keys(stage_of(stage, words), words)]


def stage_of(stage: str | None, overrides: Iterable[str]) -> str:
    """Return sft or grpo: the given stage, or the first whose command accepts the recipe.

    Both accept a file without `stage:`, which is for grpo if it is in a folder of that name.

    Raises:
        UserError: the recipe is for another stage than the given one.
    """
    from verl_ext.trainer.stages import chosen_recipe  # here, because it imports hydra

    words = [text for text in overrides if text.startswith("recipe=")]
    is_in_grpo_folder = bool(words) and "grpo" in words[-1].removeprefix("recipe=").split("/")
    accepting = []
    for command in ("grpo", "sft") if is_in_grpo_folder else ("sft", "grpo"):
        with suppress(UserError):
            chosen_recipe(command, words)
            accepting.append(command)
    if stage is not None and accepting and stage not in accepting:
        raise UserError(f"{words[-1] if words else 'the recipe'} is not for stage={stage}; set stage={accepting[0]}")
    return stage or next(iter(accepting), "sft")


def make_plans(options: PlanOptions, overrides: list[str], largest: bool) -> tuple[list[RunPlan], list[str]]:
    """Return a plan for each number of GPUs, and notes about all plans.

    Args:
        overrides: overrides of the configuration, including `recipe=`.
        largest: whether to use the largest micro-batch that fits instead of the configured one.

    Raises:
        UserError: bad input.
    """
    # here, because torch takes seconds to import
    from verl_ext.plan.model_shape import empty_model, find_model, settle, shape_of
    from verl_ext.plan.planner import largest_that_fits, make_plan
    from verl_ext.plan.step_time import DISK_GBPS, HARDWARE, Cluster
    from verl_ext.plan.workload import DataLengths, ignored_settings, require_formulas
    from verl_ext.trainer.stages import GRPOConfig, load_config

    config = require_formulas(load_config(stage_of(options.stage, overrides), overrides))
    if isinstance(config, GRPOConfig) and options.loss_token_fraction != 1:
        raise UserError(
            "loss_token_fraction is for sft only, because all tokens of completions are in GRPO's loss; omit it"
        )
    model_config, notes = find_model(config)
    hardware = HARDWARE[options.hardware]
    settle(config, model_config, hardware.is_gpu)
    shape = shape_of(model_config, empty_model(model_config, config.model))
    if config.model.use_liger:
        notes.append("the plan does not count the activations that model.use_liger saves, so it is an upper bound")
    if ignored := ignored_settings(config):
        notes.append(f"the plan ignores {', '.join(ignored)}")
    if options.mfu is not None:
        hardware = replace(hardware, compute_share=options.mfu)
    lengths = DataLengths(options.mean_length, options.loss_token_fraction)
    plans = []
    for gpus in dict.fromkeys(options.gpus):
        cluster = Cluster(hardware, gpus, options.gpus_per_node, options.disk_gbps or DISK_GBPS)
        plan = make_plan(config, shape, cluster, lengths)
        plans.append(largest_that_fits(plan) if largest else plan)
    return plans, notes


# Output


def as_text(plan: RunPlan, notes: Iterable[str]) -> str:
    """Format a plan as text."""
    config, cluster, work, time, disk = plan.config, plan.cluster, plan.work, plan.time, plan.disk
    is_async = config.trainer.checkpoint.async_save
    lines = [
        f"{config.recipe} ({config.stage}) on {cluster.gpus} x {cluster.hardware.name}, {cluster.num_nodes} "
        f"{'node' if cluster.num_nodes == 1 else 'nodes'}: {plan.shape.model_type}, {plan.shape.numel:,} parameters",
        f"per rank and step: {work.num_updates} update{'s' * (work.num_updates > 1)} x {work.num_micro_batches} "
        f"micro-batch{'es' * (work.num_micro_batches > 1)}, each up to {work.rows} x {work.row_tokens} tokens; "
        f"global batch: {work.samples} samples, mean length {work.tokens_per_sample:,.0f} tokens",
        *(f"note: {each}" for each in notes),
        "",
        f"Memory of a rank at its peak ({plan.memory.peak_phase}), GiB",
        *(f"  {part:24}{value / GIB:9.2f}" for part, value in plan.memory.peak.items()),
        f"  {'total':24}{plan.memory.peak_bytes / GIB:9.2f}   of {cluster.hardware.memory_bytes / GIB:.1f}",
        f"  in other phases: {other_phases(plan)}",
        "",
        "Seconds of a step",
        *(f"  {part:24}{value:9.3f}" for part, value in time.parts.items()),
        f"  {'total':24}{time.total_s:9.3f}   {time.hidden_s:.3f} of communication overlaps with compute",
        "",
        "Disk, GiB",
        *(f"  {part:24}{value / GIB:9.2f}" for part, value in disk.parts.items()),
        f"  {'one checkpoint':24}{disk.checkpoint_bytes / GIB:9.2f}   {disk.save_s:.1f} s to write at "
        f"disk_gbps={cluster.disk_gbps:g}, {'in the background' if is_async else 'while training waits'}",
        f"  {all_checkpoints(plan)}",
        "",
        f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s / cluster.gpus:,.0f} per GPU, MFU {plan.mfu:.1%}, "
        f"bound by {plan.bound_by}",
        "It fits." if plan.fits else f"It does not fit: {plan.fix}",
    ]
    return "\n".join(lines)


def other_phases(plan: RunPlan) -> str:
    """Return the total of each phase except the peak, largest first."""
    totals = {name: sum(parts.values()) for name, parts in plan.memory.phases.items() if name != plan.memory.peak_phase}
    ordered = sorted(totals.items(), key=lambda item: -item[1])
    return "; ".join(f"{name} {value / GIB:.2f}" for name, value in ordered)


def all_checkpoints(plan: RunPlan) -> str:
    """Say how much space all checkpoints take, or how fast it grows."""
    disk, trainer = plan.disk, plan.config.trainer
    if disk.total_bytes is None:
        return f"trainer.max_ckpt_to_keep=null keeps all checkpoints: one more every {trainer.save_freq} steps"
    number = f"at most {disk.max_checkpoints}, including the one being written" if disk.max_checkpoints != 1 else "one"
    return f"{'all checkpoints':24}{disk.total_bytes / GIB:9.2f}   {number}"


def as_markdown(plans: Sequence[RunPlan]) -> str:
    """Format plans as a table, one row per plan, in GiB and seconds; with a column for the engine if there is one."""
    from verl_ext.plan.memory import PARTS

    has_engine = any(plan.work.is_grpo for plan in plans)
    rows: list[dict[str, str]] = []
    for plan in plans:
        peak, total = plan.memory.peak, plan.disk.total_bytes
        parts = {part: peak.get(part, 0.0) for part in PARTS}
        engine = {"engine": plan.memory.peak_bytes - sum(parts.values())} if has_engine else {}
        rows.append(
            {
                "GPUs": str(plan.cluster.gpus),
                "micro-batch": plan.micro_batch,
                **{part: f"{value / GIB:.1f}" for part, value in (parts | engine).items()},
                "peak": f"{plan.memory.peak_bytes / GIB:.1f}",
                "fits": "yes" if plan.fits else "no",
                "step, s": f"{plan.time.total_s:.2f}",
                "tokens/s": f"{plan.time.tokens_per_s:,.0f}",
                "MFU": f"{plan.mfu:.1%}",
                "bound by": plan.bound_by,
                "checkpoint": f"{plan.disk.checkpoint_bytes / GIB:.1f}",
                "all checkpoints": "all are kept" if total is None else f"{total / GIB:.1f}",
                "save, s": f"{plan.disk.save_s:.1f}",
            }
        )
    return markdown_table([*rows[0]], ([*row.values()] for row in rows))


def as_json(plan: RunPlan, notes: Iterable[str]) -> dict[str, Any]:
    """Format a plan as JSON, in bytes and seconds."""
    return {
        "recipe": plan.config.recipe,
        "stage": plan.config.stage,
        "hardware": plan.cluster.hardware.name,
        "gpus": plan.cluster.gpus,
        "gpus_per_node": plan.cluster.gpus_per_node,
        "parameters": plan.shape.numel,
        "micro_batches": plan.work.num_micro_batches * plan.work.num_updates,
        "micro_batch_tokens": plan.work.tokens,
        "memory_bytes": plan.memory.phases,
        "peak": plan.memory.peak_phase,
        "peak_bytes": plan.memory.peak_bytes,
        "fits": plan.fits,
        "advice": plan.fix,
        "seconds": plan.time.parts,
        "step_s": plan.time.total_s,
        "hidden_communication_s": plan.time.hidden_s,
        "tokens_per_s": plan.time.tokens_per_s,
        "mfu": plan.mfu,
        "bound_by": plan.bound_by,
        "disk_bytes": plan.disk.parts,
        "checkpoint_bytes": plan.disk.checkpoint_bytes,
        "max_checkpoints": plan.disk.max_checkpoints,
        "all_checkpoints_bytes": plan.disk.total_bytes,
        "disk_gbps": plan.cluster.disk_gbps,
        "save_s": plan.disk.save_s,
        "notes": list(notes),
    }


# The command


def build_parser() -> CommandParser:
    """Return the parser of the command line."""
    own = {name: key.setting.doc for name, key in keys(PlanOptions).items()}
    parser = CommandParser(
        prog=program("plan"),
        description="Predict memory, speed and disk use of a recipe for given GPU counts, without starting training.",
        examples=[
            f"{program('plan')} recipe=qwen2.5_coder_7b gpus=8 hardware=h100",
            f"{program('plan')} recipe=qwen2.5_coder_7b gpus=8,64,512 --markdown",
            f"{program('plan')} recipe=quickstart gpus=2 hardware=cpu mean_length=150 --largest",
        ],
        notes=f"options as key=value:\n{definitions(own)}\n\ndocs/design/memory_model.md explains the formulas.",
        exit_codes={"0": "every plan fits", "1": "a plan does not fit", **FAILURES},
        keys=known_words,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="recipe=NAME, overrides of its configuration, and the options below",
    )
    parser.add_argument("--largest", action="store_true", help="use the largest micro-batch or token budget that fits")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="print a table with a row for each number of GPUs")
    output.add_argument("--json", action="store_true", help="print a JSON list with the memory of every phase in bytes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Plan; returns 0 when all plans fit, otherwise 1. `clean_exit` has the other exit codes."""
    with clean_exit():
        arguments = build_parser().parse_intermixed_args(argv)
        plans, notes = make_plans(*PlanOptions.parse(arguments.words), arguments.largest)
        if arguments.markdown:
            text = as_markdown(plans)
        elif arguments.json:
            text = json.dumps([as_json(plan, notes) for plan in plans], indent=1)
        else:
            text = "\n\n".join(as_text(plan, notes) for plan in plans)
        print_line(text)
        return int(not all(plan.fits for plan in plans))


if __name__ == "__main__":
    sys.exit(main())
