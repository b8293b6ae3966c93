"""Metrics of GRPO's samples and updates, reduced over all ranks, and rows of the sample table."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from verl_ext.distributed import reduce_over_ranks
from verl_ext.grpo.protocols import Environment, Metrics, Policy, Trajectory
from verl_ext.metrics.jsonl import SampleRow

ALL_STATISTICS = ("mean", "std", "min", "max")
"""Statistics of `distribution_metrics`; std is the population standard deviation."""
CORRECTNESS = ("reward_correct", "code_tests")
"""Reward functions that measure how often answers are right."""
MAX_SOURCES, MAX_NAME_CHARACTERS = 20, 40
"""Maximum number of data sources with separate metrics, and length of a source in a metric's name."""
MAX_SHOWN_CHARACTERS = 300
"""Maximum length of a sample in a message."""


def distribution_metrics(
    columns: Mapping[str, Sequence[float]], statistics: Mapping[str, Sequence[str]], device: str
) -> Metrics:
    """Compute statistics over the values of all ranks, as metrics `NAME_mean` and so on; collective.

    Args:
        columns: values of this rank, by names that are the same on every rank. An empty column has no metrics.
        statistics: statistics of each column, from `ALL_STATISTICS`.
        device: device for reductions over ranks.
    """
    sums: dict[str, float] = {}
    maxima: dict[str, float] = {}
    for name, values in columns.items():
        sums |= {f"{name} n": len(values), f"{name} x": math.fsum(values)}
        maxima |= {
            f"{name} max": max(values, default=-math.inf),
            f"{name} min": max((-v for v in values), default=-math.inf),
        }
    found = reduce_over_ranks(sums=sums, maxima=maxima, device=device)
    means = {name: found[f"{name} x"] / found[f"{name} n"] for name in columns if found[f"{name} n"]}
    squares = {name: math.fsum((value - mean) ** 2 for value in columns[name]) for name, mean in means.items()}
    squares = reduce_over_ranks(sums=squares, device=device)
    metrics: Metrics = {}
    for name, mean in means.items():
        std = math.sqrt(squares[name] / found[f"{name} n"])
        of_column = {"mean": mean, "std": std, "min": -found[f"{name} min"], "max": found[f"{name} max"]}
        metrics |= {f"{name}_{statistic}": of_column[statistic] for statistic in statistics[name]}
    return metrics


def sample_metrics(
    kind: str, trajectories: Sequence[Trajectory], policy: Policy, environment: Environment, device: str
) -> Metrics:
    """Metrics of rewards and lengths; `kind` is train or eval; collective."""
    rewards = [trajectory.reward for trajectory in trajectories if trajectory.reward is not None]
    measured = [policy.sample_metrics(trajectory) for trajectory in trajectories]
    components = {
        name: [reward.components[name] for reward in rewards if not reward.failures and name in reward.components]
        for name in environment.reward_names
    }
    totals = {"reward_total": [reward.total for reward in rewards if reward.total is not None]}
    sizes = {name: [metrics[name] for metrics in measured] for name in policy.metric_names}
    results = {name: [reward.metrics[name] for reward in rewards] for name in environment.metric_names}
    statistics = {
        **dict.fromkeys(components, ("mean",)),
        **dict.fromkeys(totals, ALL_STATISTICS),
        **dict.fromkeys(sizes, ("mean", "max")),
        **dict.fromkeys(results, ("mean", "std")),
    }
    metrics = distribution_metrics({**components, **totals, **sizes, **results}, statistics, device)
    counts = {
        "reward_failures": sum(len(reward.failures) for reward in rewards),
        "samples_without_reward": sum(bool(reward.failures) for reward in rewards),
        policy.count_name: sum(map(policy.num_decisions, trajectories)),
    }
    metrics |= reduce_over_ranks(sums=counts, device=device)
    return {f"{kind}/{name}": value for name, value in metrics.items()}


def source_names(sources: Iterable[str]) -> dict[str, str]:
    """Name in metrics of each `data_source`, given those of all prompts; empty if there is only one.

    Sources are users' texts: names contain letters, digits, `_` and `-`. Only the `MAX_SOURCES` largest have one.
    """
    counts = Counter(sources)
    names: dict[str, str] = {}
    for source in sorted(counts, key=lambda each: (-counts[each], each))[:MAX_SOURCES] if len(counts) > 1 else ():
        name = base = re.sub(r"[^\w-]", "_", source)[:MAX_NAME_CHARACTERS]
        number = 1
        while name in names.values():
            number += 1
            name = f"{base}_{number}"
        names[source] = name
    return names


def source_metrics(
    trajectories: Sequence[Trajectory], names: Mapping[str, str], environment: Environment, device: str
) -> Metrics:
    """Mean reward and correctness in an evaluation for each `data_source`; collective.

    Args:
        trajectories: samples of this rank.
        names: see `source_names`; the same on every rank.
    """
    if not names:
        return {}
    columns: dict[str, list[float]] = {
        f"{name}/{reward}": []
        for name in names.values()
        for reward in ("reward_total", *(each for each in environment.reward_names if each in CORRECTNESS))
    }
    for trajectory in trajectories:
        name, reward = names.get(source_of(trajectory.prompt.fields)), trajectory.reward
        if name is not None and reward is not None and reward.total is not None:
            for metric, value in {**reward.components, "reward_total": reward.total}.items():
                if f"{name}/{metric}" in columns:
                    columns[f"{name}/{metric}"].append(value)
    means = distribution_metrics(columns, dict.fromkeys(columns, ("mean",)), device)
    return {f"eval/{metric}_of_{name}": value for key, value in means.items() for name, metric in [key.split("/")]}


def source_of(fields: Mapping[str, Any]) -> str:
    """The `data_source` of a row of data."""
    return str(fields.get("data_source") or "unknown")


class UpdateMetrics:
    """Collects metrics over the micro-batches of a step's updates.

    Args:
        device: device for reductions over ranks.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._losses: list[float] = []
        self._grad_norms: list[float] = []
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._maxima: defaultdict[str, float] = defaultdict(float)

    def add_update(self, loss: float, grad_norm: float) -> None:
        """Add the loss of an update over all ranks, and the gradient norm before clipping."""
        self._losses.append(loss)
        self._grad_norms.append(grad_norm)

    def add_sums(self, sums: Mapping[str, float], num_decisions: float) -> None:
        """Add sums over the decisions of a micro-batch; their means per decision are logged."""
        for name, value in sums.items():
            self._sums[name] += value
            self._counts[name] += num_decisions

    def add_maximum(self, name: str, values: torch.Tensor) -> None:
        """Update the maximum that is logged as `NAME_max`; NaN if any value is NaN."""
        largest = torch.tensor([self._maxima[name], float(values.max())], dtype=torch.float64).max()
        self._maxima[name] = float(largest)  # unlike Python's `max`, torch's keeps NaN

    def reduced(self) -> Metrics:
        """Return the metrics over all ranks and updates by full name, none without an update; collective."""
        counts = {f"{name} n": count for name, count in self._counts.items()}
        sums = reduce_over_ranks(sums={**self._sums, **counts}, device=self._device)
        maxima = reduce_over_ranks(maxima=self._maxima, device=self._device)
        means = {name: sums[name] / max(sums[f"{name} n"], 1.0) for name in self._sums}
        if not self._losses:
            return {}
        return {
            "train/loss": sum(self._losses) / len(self._losses),
            "train/grad_norm": sum(self._grad_norms) / len(self._grad_norms),
            **{f"train/{name}": value for name, value in means.items() if name != "rollout_logprob_diff"},
            "train/rollout_logprob_diff_mean": means["rollout_logprob_diff"],
            **{f"train/{name}_max": value for name, value in maxima.items()},
        }


# Sample table


def sample_rows(
    split: str, trajectories: Sequence[Trajectory], policy: Policy, environment: Environment
) -> list[SampleRow]:
    """Samples with rewards and, in the split train, with advantages; the split is train or eval."""
    rows: list[SampleRow] = []
    for trajectory in trajectories:
        reward = trajectory.reward
        assert reward is not None, "samples are shown after their episode"
        rows.append(
            {
                "split": split,
                "sample_id": trajectory.prompt.sample_id,
                "number": trajectory.number,
                **policy.table_row(trajectory),
                **reward.texts,
                **{name: reward.components.get(name) for name in environment.reward_names},
                **reward.metrics,
                "reward_total": reward.total,
                "advantage": trajectory.advantage if split == "train" else None,
            }
        )
    return rows


def describe(trajectory: Trajectory, policy: Policy) -> str:
    """A sample in a message, abbreviated."""
    shown = " | ".join(f"{column}: {text!r}" for column, text in policy.table_row(trajectory).items())
    return f"sample {trajectory.number} of {trajectory.prompt.sample_id}, {shown[:MAX_SHOWN_CHARACTERS]}"
