"""Metrics of GRPO's samples and updates, reduced over all ranks, and samples as rows for readers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_ext.distributed import reduce_over_ranks
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.experience import Experience
from verl_ext.grpo.policy import Policy, Sample
from verl_ext.grpo.update import Updated
from verl_ext.metrics.jsonl import SampleRow

MAX_SHOWN_CHARACTERS = 300
"""Of a sample in a message."""


@dataclass(frozen=True)
class Spread:
    """Statistics of the values of all ranks; `std` is the population standard deviation."""

    mean: float
    std: float
    min: float
    max: float

    def named(self, name: str, *statistics: str) -> dict[str, float]:
        """Some of the statistics as metrics: `mean` as `NAME_mean`."""
        return {f"{name}_{statistic}": getattr(self, statistic) for statistic in statistics}


def spreads(columns: Mapping[str, Sequence[float]], device: str) -> dict[str, Spread]:
    """The spread of every column that has a value on any rank; collective, with the same columns on every rank."""
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
    return {
        name: Spread(
            means[name], math.sqrt(squares[name] / found[f"{name} n"]), -found[f"{name} min"], found[f"{name} max"]
        )
        for name in means
    }


@dataclass(frozen=True)
class GRPOMetrics:
    """Computes metrics that are the same on every rank; all but `rows` and `describe` are collective.

    Attributes:
        policy: measures samples.
        environment: names the rewards and their metrics.
        device: for reductions over ranks.
    """

    policy: Policy
    environment: Environment
    device: str

    def of_samples(self, kind: str, samples: Sequence[Sample], rewards: Sequence[Reward]) -> dict[str, float]:
        """Metrics of rewards and lengths; `kind` is train or eval."""
        columns = {
            name: [reward.parts[name] for reward in rewards if not reward.failures] for name in self.environment.names
        }
        columns["reward_total"] = [reward.total for reward in rewards if reward.total is not None]
        measured = [self.policy.measure(sample) for sample in samples]
        sizes = {name: [figures[name] for figures in measured] for name in self.policy.figures}
        results = {name: [reward.figures[name] for reward in rewards] for name in self.environment.figures}
        found = spreads({**columns, **sizes, **results}, self.device)
        figures = {f"{name}_mean": found[name].mean for name in columns if name in found}
        if "reward_total" in found:
            figures |= found["reward_total"].named("reward_total", "std", "min", "max")
        for name in sizes:
            figures |= found[name].named(name, "mean", "max")
        for name in results:
            figures |= found[name].named(name, "mean", "std")
        counts = {
            "reward_failures": sum(len(reward.failures) for reward in rewards),
            "samples_without_reward": sum(bool(reward.failures) for reward in rewards),
            self.policy.count_name: sum(map(self.policy.num_decisions, samples)),
        }
        figures |= reduce_over_ranks(sums=counts, device=self.device)
        return {f"{kind}/{name}": value for name, value in figures.items()}

    def of_update(self, experience: Experience, updated: Updated) -> dict[str, float]:
        """Metrics of a step's groups and of the updates from them."""
        advantages = spreads({"adv": experience.advantages.values.tolist()}, self.device)["adv"]
        counts = {
            "train/groups_without_signal": experience.advantages.num_without_signal,
            "train/groups_replaced": experience.num_replaced,
        }
        return {
            "train/loss": updated.loss,
            "train/grad_norm": updated.grad_norm,
            **{f"train/{name}": value for name, value in updated.means.items() if name != "rollout_logprob_diff"},
            "train/rollout_logprob_diff_mean": updated.means["rollout_logprob_diff"],
            **{f"train/{name}_max": value for name, value in updated.maxima.items()},
            **advantages.named("train/adv", "mean", "std", "min", "max"),
            **reduce_over_ranks(sums=counts, device=self.device),
        }

    def rows(self, experience: Experience, count: int) -> list[SampleRow]:
        """Up to `count` samples of this rank with rewards and advantages: one of each prompt, then another."""
        every = list(zip(experience.samples, experience.rewards, experience.advantages.values.tolist()))
        return [
            {
                "sample_id": sample.prompt.sample_id,
                "number": sample.number,
                **self.policy.row(sample),
                **{name: reward.parts.get(name) for name in self.environment.names},
                **reward.figures,
                "reward_total": reward.total,
                "advantage": advantage,
            }
            for sample, reward, advantage in sorted(every, key=lambda item: item[0].number)[:count]
        ]

    def describe(self, sample: Sample) -> str:
        """A sample in a message, abbreviated."""
        shown = " | ".join(f"{column}: {text!r}" for column, text in self.policy.row(sample).items())
        return f"sample {sample.number} of {sample.prompt.sample_id}, {shown[:MAX_SHOWN_CHARACTERS]}"
