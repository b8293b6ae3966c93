"""A vision-language model with its controller, as it is used: a question and a latency budget in, an answer out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image

from verl_ext.controller.configuration import Configuration
from verl_ext.controller.distribution import ConfigurationDistribution
from verl_ext.controller.execution import Executor, Seen
from verl_ext.controller.latency import Latency, now
from verl_ext.controller.network import BudgetController
from verl_ext.controller.traced import TracedController


@dataclass(frozen=True)
class Decision:
    """What the controller chose, and what that took beside the encoding of the image at the lowest tier.

    Attributes:
        configuration: the likeliest one.
        features_ms: pooling the encoded image, and embedding the question.
        network_ms: the controller's own forward pass.
        choice_ms: taking the likeliest configuration of its distribution.
    """

    configuration: Configuration
    features_ms: float
    network_ms: float
    choice_ms: float

    @property
    def own_ms(self) -> float:
        """All of it."""
        return self.features_ms + self.network_ms + self.choice_ms

    def total_ms(self, low_vision_ms: float) -> float:
        """What deciding adds to the configuration's latency, in milliseconds.

        Args:
            low_vision_ms: of encoding the image at the lowest tier. It is lost at any other tier, and at the lowest one
                it is the configuration's own.
        """
        return self.own_ms + (low_vision_ms if self.configuration.tier else 0.0)


@dataclass(frozen=True)
class Answered:
    """An answer, and what it took.

    Attributes:
        answer: the text.
        configuration: that gave it.
        decision_ms: what deciding added, see `Decision.total_ms`.
        network_ms: the controller's forward pass, which is a part of that.
        latency: of the configuration, the encoding of the image at its tier included.
    """

    answer: str
    configuration: Configuration
    decision_ms: float
    network_ms: float
    latency: Latency

    @property
    def total_ms(self) -> float:
        """Deciding and answering."""
        return self.decision_ms + self.latency.total_ms


class AdaptiveModel:
    """Answers each question by as much of the model as the controller grants it.

    Args:
        executor: of the model, asked as it was in the controller's training.
        controller: that was trained for it; it is brought to the model's device.
    """

    def __init__(self, executor: Executor, controller: BudgetController) -> None:
        self.executor, self._device = executor, executor.adapter.model.device
        self._network, self._space = TracedController(controller.to(self._device).eval()), controller.space

    def answer(self, image: Image.Image, question: str, budget_ms: float) -> Answered:
        """Decide, and answer.

        Args:
            image: in RGB.
            question: as the model is asked, the controller's `question_suffix` behind it.
            budget_ms: milliseconds that it may take.
        """
        low = self.executor.see(image, question, 0)
        decision = self.decide(low, question, budget_ms)
        tier = decision.configuration.tier
        seen = self.executor.see(image, question, tier) if tier else low
        outcome = self.executor.answer(seen, decision.configuration)
        added_ms = decision.total_ms(low.vision_ms)
        return Answered(outcome.answer, decision.configuration, added_ms, decision.network_ms, outcome.latency)

    @torch.inference_mode()
    def decide(self, low: Seen, question: str, budget_ms: float) -> Decision:
        """Choose a configuration.

        Args:
            low: the image at the lowest tier.
            question: as for `answer`.
            budget_ms: as for `answer`.
        """
        adapter, times = self.executor.adapter, [now(self._device)]
        vision, language = adapter.pooled_vision(low.encoding), adapter.pooled_language(question)
        times.append(now(self._device))
        logits = self._network(vision.float()[None], language.float()[None], budget_ms)
        times.append(now(self._device))
        # a few small operations, which wait less for each other on the CPU
        chosen = ConfigurationDistribution(self._space, *(each.cpu() for each in logits)).mode()
        [configuration] = chosen.configurations(self._space)
        times.append(now(self._device))
        return Decision(configuration, *(1e3 * (end - begin) for begin, end in zip(times, times[1:])))
