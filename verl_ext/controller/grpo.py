"""The controller as a policy: an action is a configuration for a sample and a budget, a single decision."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_ext.controller.distribution import Choices, ConfigurationDistribution, num_uniforms
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.network import BudgetController
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.grpo.protocols import LogProbs, Metrics, MicroBatch, Policy, Prompt, Trajectory
from verl_ext.grpo.sampling import sample_seed

BUDGET_NUMBER = -1
"""Number of the seed of a prompt's budget; its samples are numbered from 0."""


@dataclass(frozen=True)
class BudgetedConfiguration:
    """An action of the controller.

    Attributes:
        configuration: of the model.
        budget_ms: milliseconds for which it was chosen.
        log_prob: when it was sampled.
        vision: (vision_width,), the controller's input.
        language: (width,), the controller's input.
    """

    configuration: Configuration
    budget_ms: float
    log_prob: float
    vision: torch.Tensor
    language: torch.Tensor


class ControllerPolicy(Policy):
    """Samples a budget for each prompt, and configurations for it from the controller's distribution.

    Args:
        controller: the trained model, as FSDP2 modules or plain.
        runner: computes the features of a sample.
        budgets_ms: lowest and highest; training samples uniformly between them.
        seed: `trainer.seed`.
        device: of the controller.
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
        tier_entropy_weight: float = 1.0,
    ) -> None:
        self._tier_entropy_weight = tier_entropy_weight
        self._controller, self._runner, self._seed, self._device = controller, runner, seed, device
        self._low_ms, self._high_ms = budgets_ms
        self._space: ConfigurationSpace = controller.config.space

    @torch.no_grad()
    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """See `Policy.generate`; an evaluation has the same budgets at every step, spread over the whole range."""
        if not trajectories:  # the other ranks need this one for their forward pass
            config = self._controller.config
            self._distribution(
                torch.zeros(1, config.vision_width), torch.zeros(1, config.language_width), torch.tensor([self._low_ms])
            )
            return
        features = [self._runner.features(trajectory.prompt.fields["sample"]) for trajectory in trajectories]
        budgets = [self._budget_ms(trajectory.prompt, 0 if greedy else step) for trajectory in trajectories]
        vision, language = (torch.stack([each[part] for each in features]) for part in (0, 1))
        was_training = self._controller.training
        self._controller.eval()
        distribution = self._distribution(vision, language, torch.tensor(budgets))
        self._controller.train(was_training)
        choices = distribution.mode() if greedy else distribution.sample(self._uniforms(trajectories, step))
        configurations, log_probs = choices.configurations(self._space), distribution.log_prob(choices).tolist()
        for trajectory, configuration, budget_ms, log_prob, inputs in zip(
            trajectories, configurations, budgets, log_probs, features, strict=True
        ):
            yield trajectory.act(BudgetedConfiguration(configuration, budget_ms, log_prob, *inputs))

    def collate(self, trajectories: Sequence[Trajectory]) -> MicroBatch:
        """See `Policy.collate`."""
        actions = [trajectory.action for trajectory in trajectories]
        choices = Choices.of([action.configuration for action in actions], self._space)
        return {
            "vision": torch.stack([action.vision for action in actions]),
            "language": torch.stack([action.language for action in actions]),
            "budgets_ms": torch.tensor([action.budget_ms for action in actions]),
            "tiers": choices.tiers,
            "masks": choices.masks,
            "topk": choices.topk,
            "response_mask": torch.ones(len(actions), 1),
            "rollout_log_probs": torch.tensor([[action.log_prob] for action in actions], dtype=torch.float64),
        }

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """See `Policy.log_probs`."""
        distribution = self._distribution(micro_batch["vision"], micro_batch["language"], micro_batch["budgets_ms"])
        choices = Choices(*(micro_batch[name].to(self._device) for name in ("tiers", "masks", "topk")))
        bonus = distribution.entropy_bonus(self._tier_entropy_weight)
        return LogProbs(distribution.log_prob(choices)[:, None], bonus[:, None])

    def num_decisions(self, trajectory: Trajectory) -> int:
        """See `Policy.num_decisions`."""
        return 1

    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        """See `Policy.sample_metrics`."""
        configuration = trajectory.action.configuration
        topk = sum(configuration.topk) / configuration.num_active
        values = (trajectory.action.budget_ms, configuration.num_active, configuration.tier, topk)
        return dict(zip(self.metric_names, values))

    def table_row(self, trajectory: Trajectory) -> dict[str, str]:
        """See `Policy.table_row`."""
        configuration = self._space.describe(trajectory.action.configuration)
        return {
            "prompt": trajectory.prompt.fields["sample"].question,
            "budget_ms": f"{trajectory.action.budget_ms:.1f}",
            "tier": configuration["tier"],
            "blocks": configuration["blocks"],
            "topk": json.dumps(configuration["topk"]),
        }

    def _budget_ms(self, prompt: Prompt, step: int) -> float:
        generator = torch.Generator().manual_seed(sample_seed(self._seed, step, prompt.sample_id, BUDGET_NUMBER))
        return self._low_ms + (self._high_ms - self._low_ms) * float(torch.rand((), generator=generator))

    def _uniforms(self, trajectories: Sequence[Trajectory], step: int) -> torch.Tensor:
        """(trajectories, decisions), random numbers that depend on the trajectory and the step only."""
        rows = []
        for trajectory in trajectories:
            seed = sample_seed(self._seed, step, trajectory.prompt.sample_id, trajectory.number)
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.rand(num_uniforms(self._space), generator=generator, dtype=torch.float64))
        return torch.stack(rows).to(self._device)

    def _distribution(
        self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: torch.Tensor
    ) -> ConfigurationDistribution:
        # a call of the module itself, because its hooks gather what FSDP2 has sharded
        inputs = (each.to(self._device) for each in (vision, language, budgets_ms))
        return ConfigurationDistribution(self._space, *self._controller(*inputs))
