"""The vision-language model as the environment: a configuration is run for its sample and rewarded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from verl_ext.controller.configuration import ConfigurationSpace
from verl_ext.controller.execution import Executor, Outcome
from verl_ext.controller.reward import NAMES, RewardWeights
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.policy import Sample


class ModelEnvironment(Environment):
    """Runs what was chosen, one after the other, when the rewards are asked for.

    Args:
        executor: runs a configuration.
        space: of the configurations.
        weights: of the reward's parts.
        score: an answer against its references, from 0 to 1.
        latency_of: milliseconds of an outcome: as measured, or by the latency model.
    """

    names = NAMES
    figures = ("accuracy", "latency_ms", "budget_violation")

    def __init__(
        self,
        executor: Executor,
        space: ConfigurationSpace,
        weights: RewardWeights,
        score: Callable[[str, Sequence[str]], float],
        latency_of: Callable[[Outcome], float],
    ) -> None:
        self._executor, self._space, self._weights = executor, space, weights
        self._score, self._latency_of = score, latency_of
        self._waiting: list[Sample] = []
        self._measures = False

    @contextmanager
    def measuring(self, measures: bool) -> Iterator[None]:
        """Inside, latencies are measured anew for each sample if `measures`, wherever they come from otherwise."""
        former, self._measures = self._measures, measures
        try:
            yield
        finally:
            self._measures = former

    def submit(self, sample: Sample) -> None:
        """See `Environment.submit`."""
        self._waiting.append(sample)

    def collect(self) -> list[Reward]:
        """See `Environment.collect`."""
        waiting, self._waiting = self._waiting, []
        return [self._reward(sample) for sample in waiting]

    def close(self) -> None:
        """See `Environment.close`: nothing was started."""

    def _reward(self, sample: Sample) -> Reward:
        action, question = sample.action, sample.prompt.content["sample"]
        run = self._executor.run_anew if self._measures else self._executor.run
        outcome = run(question, action.configuration)
        latency_ms = outcome.latency.total_ms if self._measures else self._latency_of(outcome)
        accuracy = self._score(outcome.answer, question.references)
        complexity = self._space.complexity(action.configuration)
        parts = self._weights.parts(accuracy, latency_ms, action.budget_ms, complexity)
        over = float(latency_ms > action.budget_ms)
        figures = {"accuracy": accuracy, "latency_ms": latency_ms, "budget_violation": over}
        return Reward(parts, finished=time.perf_counter(), figures=figures)
