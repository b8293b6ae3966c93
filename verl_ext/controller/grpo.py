"""The controller in GRPO: its policy, and the environment, which rewards it with the frozen vision-language model.

An action is the choice of a configuration for a sample and a budget, a single decision.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from verl_ext.controller.config import BudgetRewardConfig
from verl_ext.controller.distribution import Choices, ConfigurationDistribution, num_uniforms
from verl_ext.controller.execution import RunResult, VLMRunner
from verl_ext.controller.latency import LatencySource
from verl_ext.controller.network import BudgetController
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.grpo.protocols import (
    Environment,
    LogProbs,
    Metrics,
    MicroBatch,
    Policy,
    Prompt,
    Reward,
    StepResult,
    Trajectory,
)
from verl_ext.grpo.sampling import sample_seed

REWARD_NAMES = tuple(f"reward_{part}" for part in ("accuracy", "latency", "violation", "complexity", "efficiency"))
BUDGET_NUMBER = -1
"""Sample number for the seed of a prompt's budget; samples are numbered from 0."""


@dataclass(frozen=True)
class BudgetedConfiguration:
    """An action of the controller with its inputs.

    Attributes:
        log_prob: log-probability at sampling.
        vision: (vision_width,), input of the controller.
        language: (language_width,), input of the controller.
    """

    configuration: Configuration
    budget_ms: float
    log_prob: float
    vision: torch.Tensor
    language: torch.Tensor


class ControllerPolicy(Policy):
    """Samples a budget for each prompt, and configurations for it from the controller's distribution.

    Args:
        controller: the model to train, with or without FSDP2.
        runner: computes the features of a sample.
        budgets_ms: lowest and highest budget; training samples uniformly between them.
        tier_entropy_weight: see `ConfigurationDistribution.entropy_bonus`.
    """

    metric_names = ("budget_ms", "num_active", "tier", "topk")
    count_name, rate_name = "num_configs", "configs_per_s"

    def __init__(
        self,
        controller: BudgetController,
        runner: VLMRunner,
        budgets_ms: tuple[float, float],
        seed: int,
        device: str,
        tier_entropy_weight: float,
    ) -> None:
        self._tier_entropy_weight = tier_entropy_weight
        self._controller, self._runner, self._seed, self._device = controller, runner, seed, device
        self._low_ms, self._high_ms = budgets_ms
        self._space: ConfigurationSpace = controller.config.space

    @torch.no_grad()
    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """Evaluations use the same budgets from the whole range at every step."""
        if not trajectories:  # the other ranks need this rank for their forward pass
            config = self._controller.config
            self._distribution_without_dropout(
                torch.zeros(1, config.vision_width), torch.zeros(1, config.language_width), torch.tensor([self._low_ms])
            )
            return
        features = [self._runner.features(trajectory.prompt.fields["sample"]) for trajectory in trajectories]
        budgets = [self._budget_ms(trajectory.prompt, 0 if greedy else step) for trajectory in trajectories]
        vision, language = (torch.stack([each[part] for each in features]) for part in (0, 1))
        distribution = self._distribution_without_dropout(vision, language, torch.tensor(budgets))
        choices = distribution.mode() if greedy else distribution.sample(self._uniforms(trajectories, step))
        configurations, log_probs = choices.configurations(self._space), distribution.log_prob(choices).tolist()
        for trajectory, configuration, budget_ms, log_prob, inputs in zip(
            trajectories, configurations, budgets, log_probs, features, strict=True
        ):
            yield trajectory.act(BudgetedConfiguration(configuration, budget_ms, log_prob, *inputs))

    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        actions = [trajectory.action for trajectory in trajectories]
        choices = Choices.of([action.configuration for action in actions], self._space)
        return {
            "vision": torch.stack([action.vision for action in actions]),
            "language": torch.stack([action.language for action in actions]),
            "budgets_ms": torch.tensor([action.budget_ms for action in actions]),
            **vars(choices),
            "response_mask": torch.ones(len(actions), 1),
            "rollout_log_probs": torch.tensor([[action.log_prob] for action in actions], dtype=torch.float64),
        }

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        distribution = self._distribution(micro_batch["vision"], micro_batch["language"], micro_batch["budgets_ms"])
        choices = Choices(*(micro_batch[name].to(self._device) for name in ("tiers", "masks", "topk")))
        weight = self._tier_entropy_weight
        bonus = distribution.entropy_bonus(weight)
        entropy = bonus.detach() - (weight - 1) * distribution.tier_entropy.detach()
        return LogProbs(distribution.log_prob(choices)[:, None], entropy[:, None], bonus[:, None])

    def num_decisions(self, trajectory: Trajectory) -> int:
        return 1

    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        configuration = trajectory.action.configuration
        topk = sum(configuration.topk) / configuration.num_active
        values = (trajectory.action.budget_ms, configuration.num_active, configuration.tier, topk)
        return dict(zip(self.metric_names, values))

    def table_row(self, trajectory: Trajectory) -> dict[str, str | float]:
        configuration = self._space.describe(trajectory.action.configuration)
        return {
            "prompt": trajectory.prompt.fields["sample"].question,
            "budget_ms": trajectory.action.budget_ms,
            **configuration,
            "topk": json.dumps(configuration["topk"]),
        }

    def _budget_ms(self, prompt: Prompt, step: int) -> float:
        generator = torch.Generator().manual_seed(sample_seed(self._seed, step, prompt.sample_id, BUDGET_NUMBER))
        return self._low_ms + (self._high_ms - self._low_ms) * float(torch.rand((), generator=generator))

    def _uniforms(self, trajectories: Sequence[Trajectory], step: int) -> torch.Tensor:
        """Random numbers (trajectories, decisions) that depend only on the trajectory and the step."""
        rows = []
        for trajectory in trajectories:
            seed = sample_seed(self._seed, step, trajectory.prompt.sample_id, trajectory.number)
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.rand(num_uniforms(self._space), generator=generator, dtype=torch.float64))
        return torch.stack(rows).to(self._device)

    def _distribution_without_dropout(self, *inputs: torch.Tensor) -> ConfigurationDistribution:
        was_training = self._controller.training
        self._controller.eval()
        distribution = self._distribution(*inputs)
        self._controller.train(was_training)
        return distribution

    def _distribution(
        self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: torch.Tensor
    ) -> ConfigurationDistribution:
        # call the module itself, because its hooks gather the parameters that FSDP2 has sharded
        inputs = (each.to(self._device) for each in (vision, language, budgets_ms))
        return ConfigurationDistribution(self._space, *self._controller(*inputs))


def reward_components(
    weights: BudgetRewardConfig, accuracy: float, latency_ms: float, budget_ms: float, complexity: float
) -> dict[str, float]:
    """Compute the weighted components in `REWARD_NAMES`, with negative penalties; the reward is their sum.

    With r = latency / budget, the latency penalty is sigmoid(10 * (r - 1)), which grows smoothly around the budget,
    the violation is max(0, r - 1) squared, and the efficiency is max(0, 1 - r), the unused share of the budget.

    Args:
        weights: dimensionless weights of the components.
        accuracy: accuracy of the answer, from 0 to 1.
        complexity: share of the model that ran, from 0 to 1; see `ConfigurationSpace.complexity`.
    """
    ratio = latency_ms / budget_ms
    return {
        "reward_accuracy": weights.accuracy * accuracy,
        "reward_latency": -weights.latency_penalty * (1 / (1 + math.exp(-10 * (ratio - 1)))),
        "reward_violation": -weights.budget_violation * max(0.0, ratio - 1) ** 2,
        "reward_complexity": -weights.complexity * complexity,
        "reward_efficiency": weights.efficiency * max(0.0, 1 - ratio),
    }


class ControllerEnvironment(Environment):
    """Runs the chosen configurations one at a time, when their rewards are requested.

    Args:
        score: returns the accuracy of an answer to a question, from 0 to 1.
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
        """Measure the latency of every sample within the context if `is_measuring`, regardless of the source."""
        previous, self._is_measuring = self._is_measuring, is_measuring
        try:
            yield
        finally:
            self._is_measuring = previous

    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        """The configuration runs when the result is requested."""
        return partial(self._answer, trajectory)

    def _answer(self, trajectory: Trajectory) -> StepResult:
        action, question = trajectory.action, trajectory.prompt.fields["sample"]
        result, latency_ms = self._run(question, action.configuration)
        accuracy = self._score(question, result.answer)
        complexity = self._space.complexity(action.configuration)
        components = reward_components(self._weights, accuracy, latency_ms, action.budget_ms, complexity)
        violation = float(latency_ms > action.budget_ms)
        metrics = {"accuracy": accuracy, "latency_ms": latency_ms, "budget_violation": violation}
        references = json.dumps(question.references, ensure_ascii=False)
        texts = {"answer": result.answer, "references": references, "metric": question.metric}
        return StepResult(reward=Reward(components, metrics=metrics, texts=texts, finished_at=time.perf_counter()))

    def _run(self, question: ImageQuestion, configuration: Configuration) -> tuple[RunResult, float]:
        """Run a configuration, and return the result and its latency including the decision.

        The decision needs the encoding at the lowest tier, which a configuration of another tier cannot reuse.
        """
        encode_ms = 0.0
        if self._is_measuring:
            result = self._runner.run_uncached(question, configuration)
            if configuration.tier:
                encode_ms = self._runner.encode(question.load_image(), question.question, 0).vision_ms
            return result, result.latency.total_ms + encode_ms + self._latency.median_deciding_ms
        result = self._runner.run(question, configuration)
        if configuration.tier:
            encode_ms = self._latency.encode_ms(self._runner.encoded(question, 0))
        return result, self._latency.run_ms(result) + encode_ms + self._latency.deciding_ms
