"""The vision-language model as the environment: a configuration is run for its sample and rewarded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from verl_ext.controller.config import BudgetRewardConfig
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.execution import Executor, Outcome
from verl_ext.controller.latency_source import LatencySource
from verl_ext.controller.reward import NAMES, reward_parts
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.grpo.protocols import Environment, Reward, StepResult, Trajectory


class ControllerEnvironment(Environment):
    """Runs the chosen configurations, one after the other, when their rewards are waited for.

    Args:
        executor: runs a configuration.
        space: of the configurations.
        weights: of the reward's parts.
        score: an answer to a question, from 0 to 1.
        latency: where milliseconds come from.
    """

    reward_names = NAMES
    metric_names = ("accuracy", "latency_ms", "budget_violation")

    def __init__(
        self,
        executor: Executor,
        space: ConfigurationSpace,
        weights: BudgetRewardConfig,
        score: Callable[[ImageQuestion, str], float],
        latency: LatencySource,
    ) -> None:
        self._executor, self._space, self._weights = executor, space, weights
        self._score, self._latency = score, latency
        self._measures = False

    @contextmanager
    def measuring(self, measures: bool) -> Iterator[None]:
        """Inside, latencies are measured anew for each sample if `measures`, wherever they come from otherwise."""
        former, self._measures = self._measures, measures
        try:
            yield
        finally:
            self._measures = former

    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        """See `Environment.step`; the configuration runs when the result is waited for."""
        return partial(self._answer, trajectory)

    def _run(self, question: ImageQuestion, configuration: Configuration) -> tuple[Outcome, float]:
        """What a configuration gives, and its latency with that of the look at the lowest tier that chose it."""
        if self._measures:
            outcome = self._executor.run_anew(question, configuration)
            looking_ms = self._executor.look_anew(question) if configuration.tier else 0.0
            return outcome, outcome.latency.total_ms + looking_ms + self._latency.deciding_ms
        outcome = self._executor.run(question, configuration)
        looking_ms = 0.0
        if configuration.tier:
            looking_ms = self._latency.of_looking(self._executor.seen(question, 0), self._executor.adapter)
        return outcome, self._latency.of_run(outcome) + looking_ms + self._latency.deciding_ms

    def _answer(self, trajectory: Trajectory) -> StepResult:
        action, question = trajectory.action, trajectory.prompt.fields["sample"]
        outcome, latency_ms = self._run(question, action.configuration)
        accuracy = self._score(question, outcome.answer)
        complexity = self._space.complexity(action.configuration)
        components = reward_parts(self._weights, accuracy, latency_ms, action.budget_ms, complexity)
        violation = float(latency_ms > action.budget_ms)
        metrics = {"accuracy": accuracy, "latency_ms": latency_ms, "budget_violation": violation}
        return StepResult(reward=Reward(components, metrics=metrics, finished_at=time.perf_counter()))
