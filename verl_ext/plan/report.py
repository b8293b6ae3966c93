"""A plan as text, as a row of a Markdown table, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_ext.plan.memory import PARTS
from verl_ext.plan.plan import GIB, Plan

MEMORY_COLUMNS = (*PARTS, "engine")


def as_text(plan: Plan, advice: str, notes: Sequence[str]) -> str:
    """For people: one plan."""
    config, cluster, work, time = plan.config, plan.cluster, plan.work, plan.time
    peak = plan.memory.peak
    lines = [
        f"{config.recipe} ({config.stage}) on {cluster.gpus} x {cluster.hardware.name}, {cluster.num_nodes} "
        f"{'node' if cluster.num_nodes == 1 else 'nodes'}: {plan.shape.model_type}, {plan.shape.numel:,} parameters",
        f"a rank's step: {work.num_updates} x {work.num_micro_batches} micro-batches of at most {work.rows} x "
        f"{work.row_tokens} tokens; {work.samples} samples of {work.tokens_per_sample:,.0f} tokens in all",
        *(f"note: {each}" for each in notes),
        "",
        f"Memory of a GPU at its peak ({plan.memory.peak_moment}), GiB",
        *(f"  {part:24}{value / GIB:9.2f}" for part, value in peak.items()),
        f"  {'together':24}{plan.memory.peak_bytes / GIB:9.2f}   of {cluster.hardware.memory_bytes / GIB:.1f}",
        f"  at other moments: {other_moments(plan)}",
        "",
        "Seconds of a step",
        *(f"  {part:24}{value:9.3f}" for part, value in time.parts.items()),
        f"  {'together':24}{time.total_s:9.3f}   {time.hidden_s:.3f} of communication are hidden behind compute",
        "",
        f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s / cluster.gpus:,.0f} a GPU, MFU {plan.mfu:.1%}, "
        f"bound by {plan.bound_by}",
        "It fits." if plan.fits else f"It does not fit: {advice}",
    ]
    return "\n".join(lines)


def other_moments(plan: Plan) -> str:
    """The sum of each moment but the peak, largest first."""
    sums = {name: sum(parts.values()) for name, parts in plan.memory.moments.items() if name != plan.memory.peak_moment}
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return "; ".join(f"{name} {value / GIB:.2f}" for name, value in ordered)


def as_markdown(plans: Sequence[Plan]) -> str:
    """For documents: a row for each plan, memory in GiB; the engine's column only where there is one."""
    columns = [part for part in MEMORY_COLUMNS if part != "engine" or any(plan.work.is_grpo for plan in plans)]
    head = ("GPUs", "micro-batch", *columns, "peak", "fits", "step, s", "tokens/s", "MFU", "bound by")
    rows = [head, ("---",) * len(head), *(markdown_row(plan, columns) for plan in plans)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown_row(plan: Plan, columns: Sequence[str]) -> tuple[str, ...]:
    """The cells of one plan."""
    peak = plan.memory.peak
    engine = sum(value for part, value in peak.items() if part not in PARTS)
    return (
        str(plan.cluster.gpus),
        plan.micro_batch,
        *(f"{(engine if part == 'engine' else peak.get(part, 0)) / GIB:.1f}" for part in columns),
        f"{plan.memory.peak_bytes / GIB:.1f}",
        "yes" if plan.fits else "no",
        f"{plan.time.total_s:.2f}",
        f"{plan.time.tokens_per_s:,.0f}",
        f"{plan.mfu:.1%}",
        plan.bound_by,
    )


def as_dict(plan: Plan, advice: str, notes: Sequence[str]) -> dict[str, Any]:
    """For programs: bytes and seconds."""
    return {
        "recipe": plan.config.recipe,
        "stage": plan.config.stage,
        "hardware": plan.cluster.hardware.name,
        "gpus": plan.cluster.gpus,
        "gpus_per_node": plan.cluster.gpus_per_node,
        "parameters": plan.shape.numel,
        "micro_batches": plan.work.num_micro_batches * plan.work.num_updates,
        "micro_batch_tokens": plan.work.tokens,
        "memory_bytes": plan.memory.moments,
        "peak": plan.memory.peak_moment,
        "peak_bytes": plan.memory.peak_bytes,
        "fits": plan.fits,
        "advice": "" if plan.fits else advice,
        "seconds": plan.time.parts,
        "step_s": plan.time.total_s,
        "hidden_communication_s": plan.time.hidden_s,
        "tokens_per_s": plan.time.tokens_per_s,
        "mfu": plan.mfu,
        "bound_by": plan.bound_by,
        "notes": list(notes),
    }
