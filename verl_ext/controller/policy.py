"""The controller as the policy: an action is a configuration for a sample and a budget, one decision in all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.distribution import Choices, ConfigurationDistribution, number_of_decisions
from verl_ext.controller.execution import Executor
from verl_ext.controller.network import BudgetController
from verl_ext.grpo.protocols import LogProbs, Metrics, MicroBatch, Policy, Prompt, Trajectory
from verl_ext.grpo.sampling import sample_seed

BUDGET_NUMBER = -1
"""Number of the seed of a prompt's budget; its samples are numbered from 0."""


@dataclass(frozen=True)
class BudgetedConfiguration:
    """What was chosen.

    Attributes:
        configuration: of the model.
        budget_ms: milliseconds that it was chosen for.
        log_prob: of the choice when it was sampled.
        vision: (vision width,) that it was chosen by.
        language: (width,) that it was chosen by.
    """

    configuration: Configuration
    budget_ms: float
    log_prob: float
    vision: torch.Tensor
    language: torch.Tensor


class ControllerPolicy(Policy):
    """Samples a budget for each prompt, and configurations for it from the controller's distribution.

    Args:
        controller: what is trained, as FSDP2 modules or plain.
        executor: makes the features of a sample.
        budgets_ms: least and greatest; training samples uniformly between them.
        seed: `trainer.seed`.
        device: of the controller.
        tier_entropy_weight: see `ConfigurationDistribution.exploration`.
    """

    metric_names = ("budget_ms", "num_active", "tier", "topk")
    count_name, rate_name = "num_configs", "configs_per_s"

    def __init__(
        self,
        controller: BudgetController,
        executor: Executor,
        budgets_ms: tuple[float, float],
        seed: int,
        device: str,
        tier_entropy_weight: float = 1.0,
    ) -> None:
        self._tier_entropy_weight = tier_entropy_weight
        self._controller, self._executor, self._seed, self._device = controller, executor, seed, device
        self._low, self._high = budgets_ms
        self._space: ConfigurationSpace = controller.config.space

    @torch.no_grad()
    def generate(self, trajectories: Sequence[Trajectory], step: int, greedy: bool = False) -> Iterator[Trajectory]:
        """See `Policy.generate`; an evaluation has the same budgets at every step, spread over the whole range."""
        config = self._controller.config
        if not trajectories:  # the other ranks need this one for their forward pass
            self._distribution(torch.zeros(1, config.vision_width), torch.zeros(1, config.language_width), [self._low])
            return
        features = [self._executor.features(trajectory.prompt.fields["sample"]) for trajectory in trajectories]
        budgets = [self._budget(trajectory.prompt, 0 if greedy else step) for trajectory in trajectories]
        vision, language = (torch.stack([each[part] for each in features]) for part in (0, 1))
        training = self._controller.training
        self._controller.eval()
        distribution = self._distribution(vision, language, budgets)
        self._controller.train(training)
        chosen = distribution.mode() if greedy else distribution.sample_by(self._uniforms(trajectories, step))
        configurations, log_probs = chosen.configurations(self._space), distribution.log_prob(chosen).tolist()
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
        tensors = {name: tensor.to(self._device) for name, tensor in micro_batch.items()}
        distribution = self._controller_distribution(tensors["vision"], tensors["language"], tensors["budgets_ms"])
        choices = Choices(tensors["tiers"], tensors["masks"], tensors["topk"])
        bonus = distribution.exploration(self._tier_entropy_weight)
        return LogProbs(distribution.log_prob(choices)[:, None], bonus[:, None])

    def num_decisions(self, trajectory: Trajectory) -> int:
        """See `Policy.num_decisions`."""
        return 1

    def sample_metrics(self, trajectory: Trajectory) -> Metrics:
        """See `Policy.sample_metrics`."""
        chosen = trajectory.action.configuration
        topk = sum(chosen.topk) / chosen.num_active
        return dict(zip(self.metric_names, (trajectory.action.budget_ms, chosen.num_active, chosen.tier, topk)))

    def table_row(self, trajectory: Trajectory) -> dict[str, str]:
        """See `Policy.table_row`."""
        chosen = trajectory.action.configuration
        return {
            "prompt": trajectory.prompt.fields["sample"].question,
            "budget_ms": f"{trajectory.action.budget_ms:.1f}",
            "tier": self._space.tiers[chosen.tier],
            "blocks": "".join(str(int(runs)) for runs in chosen.blocks),
            "topk": json.dumps(chosen.topk),
        }

    def _budget(self, prompt: Prompt, step: int) -> float:
        generator = torch.Generator().manual_seed(sample_seed(self._seed, step, prompt.sample_id, BUDGET_NUMBER))
        return self._low + (self._high - self._low) * float(torch.rand((), generator=generator))

    def _uniforms(self, trajectories: Sequence[Trajectory], step: int) -> torch.Tensor:
        """(trajectories, decisions): random numbers of each trajectory's own, whatever else is sampled."""
        rows = []
        for trajectory in trajectories:
            seed = sample_seed(self._seed, step, trajectory.prompt.sample_id, trajectory.number)
            generator = torch.Generator().manual_seed(seed)
            rows.append(torch.rand(number_of_decisions(self._space), generator=generator, dtype=torch.float64))
        return torch.stack(rows).to(self._device)

    def _distribution(
        self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: Sequence[float]
    ) -> ConfigurationDistribution:
        budgets = torch.tensor(budgets_ms, device=self._device)
        return self._controller_distribution(vision.to(self._device), language.to(self._device), budgets)

    def _controller_distribution(
        self, vision: torch.Tensor, language: torch.Tensor, budgets_ms: torch.Tensor
    ) -> ConfigurationDistribution:
        # by a call of the module itself, whose hooks gather what FSDP2 has sharded
        return ConfigurationDistribution(self._space, *self._controller(vision, language, budgets_ms))
