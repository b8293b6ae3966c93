"""The charts: which metrics each shows, for which stages, and where on the page."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from verl_ext.metrics.registry import METRICS

MAIN, OTHER = "main", "other"
"""Open at the top; in a fold."""


@dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
        name: its title, in English.
        metrics: that it shows, as far as a run has them.
        place: on the page.
        scale: values are multiplied by it.
        line: a value that is marked; None for none.
        with_schedule: whether the learning rate that the recipe asks for is drawn too; such a curve is not smoothed.
    """

    name: str
    metrics: tuple[str, ...]
    place: str = OTHER
    scale: float = 1.0
    line: float | None = None
    with_schedule: bool = False


TIMES = ("step", "data", "forward_backward", "optimizer", "rollout", "reward", "advantages", "shard", "update", "save")
CHARTS = (
    Chart("Loss", ("train/loss",), MAIN),
    Chart("Perplexity", ("train/perplexity",), MAIN),
    Chart("Rewards", ("train/reward_total_mean", "eval/reward_total_mean"), MAIN),
    Chart("Accuracy", ("train/accuracy_mean", "eval/accuracy_mean"), MAIN),
    Chart("Latency and budget", ("train/latency_ms_mean", "eval/latency_ms_mean", "train/budget_ms_mean"), MAIN),
    Chart("Violation rate", ("train/budget_violation_mean", "eval/budget_violation_mean"), MAIN, line=0.05),
    Chart("Gradient norm", ("train/grad_norm",)),
    Chart("Learning rate and its schedule", ("train/lr(1e-3)",), scale=1e-3, with_schedule=True),
    Chart("Evaluation loss", ("val/loss", "train/loss")),
    Chart(
        "Training speed",
        ("throughput/train/samples_per_s", "throughput/train/valid_tokens_per_s", "throughput/train/configs_per_s"),
    ),
    Chart("Advantages", ("train/adv_mean", "train/adv_std", "train/adv_min", "train/adv_max")),
    Chart("Entropy", ("train/entropy",)),
    Chart("Completion and prompt length", ("train/seq_completion_len_mean", "train/seq_prompt_len_mean")),
    Chart("Engine against trainer", ("train/rollout_logprob_diff_mean", "train/rollout_logprob_diff_max")),
    Chart("Time by part", tuple(f"time/train/{part}_s" for part in TIMES)),
    Chart("Memory and disk", ("system/peak_memory_gib", "system/disk_free_gib")),
)
NOT_REWARDS = {
    match.group(1) for match in (re.match(r"train/(\w+)_mean$", name) for name in METRICS) if match is not None
}


def charts_for(metrics: Collection[str]) -> list[Chart]:
    """The charts of a run that has these metrics, each with those of them that it shows."""
    found = []
    for chart in CHARTS:
        shown = tuple(name for name in chart.metrics if name in metrics)
        if not shown or (chart.name == "Evaluation loss" and "val/loss" not in metrics):
            continue
        found.append(Chart(**{**vars(chart), "metrics": shown}))
        if chart.name == "Rewards" and (functions := rewards_of(metrics)):
            found.append(Chart("Reward by function", functions, MAIN))
    return found


def rewards_of(metrics: Collection[str]) -> tuple[str, ...]:
    """Names of the reward functions' metrics: means of training that are nothing else."""
    means = (re.match(r"train/(\w+)_mean$", name) for name in sorted(metrics))
    return tuple(match.group(0) for match in means if match and match.group(1) not in NOT_REWARDS)
