"""The vision-language model as an environment: it runs the chosen configuration and rewards the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from verl_ext.controller.config import BudgetRewardConfig
from verl_ext.controller.execution import RunResult, VLMRunner
from verl_ext.controller.latency import LatencySource
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.grpo.protocols import Environment, Reward, StepResult, Trajectory

REWARD_NAMES = tuple(f"reward_{part}" for part in ("accuracy", "latency", "violation", "complexity", "efficiency"))


def reward_components(
    weights: BudgetRewardConfig, accuracy: float, latency_ms: float, budget_ms: float, complexity: float
) -> dict[str, float]:
    """Weighted components by the names in `REWARD_NAMES`, with negative penalties; the reward is their sum.

    With r = latency / budget, the latency penalty is sigmoid(10 * (r - 1)), which grows smoothly around the budget,
    the violation is max(0, r - 1) squared, and the efficiency is max(0, 1 - r), the unused share of the budget.

    Args:
        weights: of the components, without a unit.
        accuracy: of the answer, from 0 to 1.
        latency_ms: milliseconds of the answer.
        budget_ms: milliseconds for the answer.
        complexity: share of the model that ran, from 0 to 1; see `ConfigurationSpace.complexity`.
    """
    ratio = latency_ms / budget_ms
    return {
        "reward_accuracy": weights.accuracy * accuracy,
        "reward_latency": -weights.latency_penalty * _sigmoid(10 * (ratio - 1)),
        "reward_violation": -weights.budget_violation * max(0.0, ratio - 1) ** 2,
        "reward_complexity": -weights.complexity * complexity,
        "reward_efficiency": weights.efficiency * max(0.0, 1 - ratio),
    }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


class ControllerEnvironment(Environment):
    """Runs the chosen configurations one after the other, when their rewards are requested.

    Args:
        runner: of the model.
        space: of the configurations.
        weights: of the reward's components.
        score: accuracy of an answer to a question, from 0 to 1.
        latency: gives milliseconds.
    """

    reward_names = REWARD_NAMES
    metric_names = ("accuracy", "latency_ms", "budget_violation")

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
        self._is_measuring = False

    @contextmanager
    def measuring(self, is_measuring: bool) -> Iterator[None]:
        """Within the context, measure the latency of every sample if `is_measuring`, whatever the latency source."""
        former, self._is_measuring = self._is_measuring, is_measuring
        try:
            yield
        finally:
            self._is_measuring = former

    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        """See `Environment.step`; the configuration runs when the result is requested."""
        return partial(self._answer, trajectory)

    def _answer(self, trajectory: Trajectory) -> StepResult:
        action, question = trajectory.action, trajectory.prompt.fields["sample"]
        result, latency_ms = self._run(question, action.configuration)
        accuracy = self._score(question, result.answer)
        complexity = self._space.complexity(action.configuration)
        components = reward_components(self._weights, accuracy, latency_ms, action.budget_ms, complexity)
        violation = float(latency_ms > action.budget_ms)
        metrics = {"accuracy": accuracy, "latency_ms": latency_ms, "budget_violation": violation}
        return StepResult(reward=Reward(components, metrics=metrics, finished_at=time.perf_counter()))

    def _run(self, question: ImageQuestion, configuration: Configuration) -> tuple[RunResult, float]:
        """The result, and its latency including the decision.

        The decision needs the encoding at the lowest tier, which a configuration of another tier does not use.
        """
        encode_ms = 0.0
        if self._is_measuring:
            result = self._runner.run_uncached(question, configuration)
            if configuration.tier:
                encode_ms = self._runner.time_encoding(question)
            return result, result.latency.total_ms + encode_ms + self._latency.deciding_ms
        result = self._runner.run(question, configuration)
        if configuration.tier:
            encode_ms = self._latency.encode_ms(self._runner.encoded(question, 0), self._runner.adapter)
        return result, self._latency.run_ms(result) + encode_ms + self._latency.deciding_ms
