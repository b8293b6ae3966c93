"""What one step learns from: groups of drawn actions with their rewards and advantages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_ext.distributed import reduce_over_ranks
from verl_ext.grpo.advantages import Advantages, group_advantages, has_signal
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.policy import Policy, Prompt, Sample
from verl_ext.metrics.timing import StepTimer, TraceFile


@dataclass(frozen=True)
class Experience:
    """Of one rank; group after group, and within a group in the order of the samples' numbers.

    Attributes:
        samples: drawn actions.
        rewards: of each.
        advantages: of each.
        num_replaced: groups that were drawn in the place of others that had no signal.
    """

    samples: list[Sample]
    rewards: list[Reward]
    advantages: Advantages
    num_replaced: int = 0


@dataclass(frozen=True)
class Replacement:
    """Dynamic sampling: groups of equal rewards give way to others (DAPO, arXiv 2503.14476).

    Attributes:
        max_rounds: how often; what has no signal then stays.
        more: this many further prompts for a round, counted from 1.
    """

    max_rounds: int
    more: Callable[[int, int], Sequence[Prompt]]


@dataclass(frozen=True)
class Collector:
    """Draws, rewards and compares.

    Attributes:
        policy: draws.
        environment: rewards, while others are still being drawn.
        group_size: actions for each prompt.
        divide_by_std: see `group_advantages`.
        timer: told `rollout`, `reward` and `advantages`.
        device: for reductions over ranks.
        trace: told of each sample's life; None for no trace.
    """

    policy: Policy
    environment: Environment
    group_size: int
    divide_by_std: bool
    timer: StepTimer
    device: str
    trace: TraceFile | None = None

    def collect(self, prompts: Sequence[Prompt], step: int, replacement: Replacement | None) -> Experience:
        """The experience of one step; collective."""
        samples, rewards = self.rewarded(prompts, step, self.group_size)
        num_replaced = 0 if replacement is None else self._replace_flat(replacement, step, samples, rewards)
        with self.timer.measure("advantages"):
            groups = [index // self.group_size for index in range(len(samples))]
            advantages = group_advantages([reward.total for reward in rewards], groups, self.divide_by_std)
        return Experience(samples, rewards, advantages, num_replaced)

    def _replace_flat(self, replacement: Replacement, step: int, samples: list[Sample], rewards: list[Reward]) -> int:
        """Put groups with a signal in the place of those without, in place; returns how many."""
        num_replaced = 0
        for number in range(1, replacement.max_rounds + 1):
            flat = self._flat_groups(rewards)
            if not reduce_over_ranks(maxima={"flat": len(flat)}, device=self.device)["flat"]:
                break
            fresh = self.rewarded(replacement.more(number, len(flat)), step, self.group_size)
            num_replaced += self._replace(flat, samples, rewards, *fresh)
        return num_replaced

    def rewarded(
        self, prompts: Sequence[Prompt], step: int, num_samples: int, greedy: bool = False
    ) -> tuple[list[Sample], list[Reward]]:
        """Samples and their rewards, in the order of the prompts and of their numbers."""
        drawn, moments = [], [time.perf_counter()]
        with self.timer.measure("rollout"):
            for sample in self.policy.draw(prompts, step, num_samples=num_samples, greedy=greedy):
                moments.append(time.perf_counter())
                self.environment.submit(sample)
                drawn.append(sample)
        with self.timer.measure("reward"):
            rewards = self.environment.collect()
        self._trace_lives(f"eval {step}" if greedy else f"{step}", drawn, rewards, moments)
        places = {id(prompt): place for place, prompt in enumerate(prompts)}
        order = sorted(range(len(drawn)), key=lambda n: (places[id(drawn[n].prompt)], drawn[n].number))
        return [drawn[n] for n in order], [rewards[n] for n in order]

    def _trace_lives(self, when: str, samples: list[Sample], rewards: list[Reward], moments: list[float]) -> None:
        if self.trace is None:
            return
        for sample, reward, drawn in zip(samples, rewards, moments[1:]):
            identity = f"{when}/{sample.prompt.sample_id}/{sample.number}"
            self.trace.async_span(identity, "rollout", moments[0], drawn)
            self.trace.async_span(identity, "reward", drawn, max(reward.finished, drawn), total=reward.total)

    def _flat_groups(self, rewards: list[Reward]) -> list[int]:
        totals = [reward.total for reward in rewards]
        starts = range(0, len(totals), self.group_size)
        return [start for start in starts if not has_signal(totals[start : start + self.group_size])]

    def _replace(
        self,
        flat: list[int],
        samples: list[Sample],
        rewards: list[Reward],
        new: list[Sample],
        new_rewards: list[Reward],
    ) -> int:
        """Put fresh groups that have a signal into the places of flat ones; returns how many."""
        empty = {*self._flat_groups(new_rewards)}
        good = [start for start in range(0, len(new), self.group_size) if start not in empty]
        for place, start in zip(flat, good):
            samples[place : place + self.group_size] = new[start : start + self.group_size]
            rewards[place : place + self.group_size] = new_rewards[start : start + self.group_size]
        return min(len(flat), len(good))
