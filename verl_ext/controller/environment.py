"""The vision-language model as the environment: a configuration is run for its sample and rewarded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from verl_ext.controller.config import BudgetRewardConfig
from verl_ext.controller.execution import RunResult, VLMRunner
from verl_ext.controller.latency import LatencySource
from verl_ext.controller.reward import NAMES, reward_parts
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.policy import Sample


class ModelEnvironment(Environment):
    """Runs what was chosen, one after the other, when the rewards are asked for.

    Args:
        executor: runs a configuration.
        space: of the configurations.
        weights: of the reward's parts.
        score: an answer to a question, from 0 to 1.
        latency: where milliseconds come from.
    """

    names = NAMES
    figures = ("accuracy", "latency_ms", "budget_violation")

    def __init__(
        self,
        runner: VLMRunner,
        space: ConfigurationSpace,
        weights: BudgetRewardConfig,
        score: Callable[[ImageQuestion, str], float],
        latency: LatencySource,
    ) -> None:
        self._runner, self._space, self._weights = runner, space, weights
        self._score, self._latency = score, latency
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

    def _run(self, question: ImageQuestion, configuration: Configuration) -> tuple[RunResult, float]:
        """What a configuration gives, and its latency with that of the look at the lowest tier that chose it."""
        if self._measures:
            outcome = self._runner.run_uncached(question, configuration)
            looking_ms = self._runner.time_encoding(question) if configuration.tier else 0.0
            return outcome, outcome.latency.total_ms + looking_ms + self._latency.deciding_ms
        outcome = self._runner.run(question, configuration)
        looking_ms = 0.0
        if configuration.tier:
            looking_ms = self._latency.encode_ms(self._runner.encoded(question, 0), self._runner.adapter)
        return outcome, self._latency.run_ms(outcome) + looking_ms + self._latency.deciding_ms

    def _reward(self, sample: Sample) -> Reward:
        action, question = sample.action, sample.prompt.content["sample"]
        outcome, latency_ms = self._run(question, action.configuration)
        accuracy = self._score(question, outcome.answer)
        complexity = self._space.complexity(action.configuration)
        parts = reward_parts(self._weights, accuracy, latency_ms, action.budget_ms, complexity)
        over = float(latency_ms > action.budget_ms)
        figures = {"accuracy": accuracy, "latency_ms": latency_ms, "budget_violation": over}
        return Reward(parts, finished=time.perf_counter(), figures=figures)
