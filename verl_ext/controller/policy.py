"""The controller as the policy: an action is a configuration for a sample and a budget, one decision in all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from verl_ext.controller.distribution import Choices, ConfigurationDistribution, num_uniforms
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.network import BudgetController
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.grpo.policy import LogProbs, MicroBatch, Policy, Prompt, Sample
from verl_ext.grpo.seeds import seed_of

OF_BUDGET = -1
"""The number of the draw that gives a prompt's budget; those of its samples count from 0."""


@dataclass(frozen=True)
class BudgetedConfiguration:
    """What was chosen.

    Attributes:
        configuration: of the model.
        budget_ms: milliseconds that it was chosen for.
        log_prob: of the choice, as it was drawn.
        vision: (vision width,) that it was chosen by.
        language: (width,) that it was chosen by.
    """

    configuration: Configuration
    budget_ms: float
    log_prob: float
    vision: torch.Tensor
    language: torch.Tensor


class ControllerPolicy(Policy):
    """Draws a budget for each prompt, and configurations for it from the controller's distribution.

    Args:
        controller: what is trained, as FSDP2 modules or plain.
        executor: makes the features of a sample.
        budgets_ms: least and greatest; training draws evenly between them.
        seed: `trainer.seed`.
        device: of the controller.
        tier_entropy_weight: see `ConfigurationDistribution.exploration`.
    """

    figures = ("budget_ms", "num_active", "tier", "topk")
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
        self._low, self._high = budgets_ms
        self._space: ConfigurationSpace = controller.config.space

    def begin_drawing(self, version: int) -> dict[str, float]:
        """See `Policy.begin_drawing`: what draws is what is trained."""
        return {}

    def end_drawing(self) -> None:
        """See `Policy.end_drawing`."""

    @torch.no_grad()
    def draw(self, prompts: Sequence[Prompt], step: int, *, num_samples: int, greedy: bool = False) -> Iterator[Sample]:
        """See `Policy.draw`; measurements have the same budgets in every step, of the whole range for all samples."""
        features = [self._runner.features(prompt.content["sample"]) for prompt in prompts]
        budgets = [self._budget(prompt, 0 if greedy else step) for prompt in prompts]
        places = [(place, number) for place in range(len(prompts)) for number in range(num_samples)]
        if not places:  # the other ranks need this one for their forward pass
            config = self._controller.config
            self._distribution(torch.zeros(1, config.vision_width), torch.zeros(1, config.language_width), [self._low])
            return
        vision, language = (torch.stack([features[place][part] for place, _ in places]) for part in (0, 1))
        training = self._controller.training
        self._controller.eval()
        distribution = self._distribution(vision, language, [budgets[place] for place, _ in places])
        self._controller.train(training)
        chosen = distribution.mode() if greedy else distribution.sample(self._uniform(prompts, places, step))
        log_probs = distribution.log_prob(chosen).tolist()
        for (place, number), configuration, log_prob in zip(
            places, chosen.configurations(self._space), log_probs, strict=True
        ):
            action = BudgetedConfiguration(configuration, budgets[place], log_prob, *features[place])
            yield Sample(prompts[place], number, action)

    def collate(self, samples: Sequence[Sample]) -> MicroBatch:
        """See `Policy.collate`."""
        actions = [sample.action for sample in samples]
        choices = Choices.of([action.configuration for action in actions], self._space)
        return {
            "vision": torch.stack([action.vision for action in actions]),
            "language": torch.stack([action.language for action in actions]),
            "budgets_ms": torch.tensor([action.budget_ms for action in actions]),
            "tiers": choices.tiers,
            "masks": choices.masks,
            "topk": choices.topk,
            "mask": torch.ones(len(actions), 1),
            "rollout_log_probs": torch.tensor([[action.log_prob] for action in actions], dtype=torch.float64),
        }

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        """See `Policy.log_probs`."""
        tensors = {name: tensor.to(self._device) for name, tensor in micro_batch.items()}
        distribution = self._controller_distribution(tensors["vision"], tensors["language"], tensors["budgets_ms"])
        choices = Choices(tensors["tiers"], tensors["masks"], tensors["topk"])
        bonus = distribution.entropy_bonus(self._tier_entropy_weight)
        return LogProbs(distribution.log_prob(choices)[:, None], bonus[:, None])

    def reference_log_probs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """See `Policy.reference_log_probs`: a controller begins from nothing that it should stay near to."""
        raise NotImplementedError("a controller has no frozen reference")

    def order(self, samples: Sequence[Sample]) -> list[int]:
        """See `Policy.order`: all cost the same."""
        return list(range(len(samples)))

    def num_decisions(self, sample: Sample) -> int:
        """See `Policy.num_decisions`."""
        return 1

    def measure(self, sample: Sample) -> dict[str, float]:
        """See `Policy.measure`."""
        chosen = sample.action.configuration
        topk = sum(chosen.topk) / chosen.num_active
        return dict(zip(self.figures, (sample.action.budget_ms, chosen.num_active, chosen.tier, topk)))

    def row(self, sample: Sample) -> dict[str, str]:
        """See `Policy.row`."""
        chosen = sample.action.configuration
        return {
            "prompt": sample.prompt.content["sample"].question,
            "budget_ms": f"{sample.action.budget_ms:.1f}",
            "tier": self._space.tiers[chosen.tier],
            "blocks": "".join(str(int(runs)) for runs in chosen.blocks),
            "topk": json.dumps(chosen.topk),
        }

    def close(self) -> None:
        """See `Policy.close`: nothing was started."""

    def _budget(self, prompt: Prompt, step: int) -> float:
        generator = torch.Generator().manual_seed(seed_of(self._seed, step, prompt.sample_id, OF_BUDGET))
        return self._low + (self._high - self._low) * float(torch.rand((), generator=generator))

    def _uniform(self, prompts: Sequence[Prompt], places: list[tuple[int, int]], step: int) -> torch.Tensor:
        """(samples, decisions): what decides each draw, the same wherever it is made."""
        rows = []
        for place, number in places:
            generator = torch.Generator().manual_seed(seed_of(self._seed, step, prompts[place].sample_id, number))
            rows.append(torch.rand(num_uniforms(self._space), generator=generator, dtype=torch.float64))
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
