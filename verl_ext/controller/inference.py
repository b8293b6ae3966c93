"""Inference with a vision-language model and its controller, within a latency budget."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from numbers import Real

import torch
from PIL import Image
from torch import nn

from verl_ext.controller.distribution import ConfigurationDistribution
from verl_ext.controller.execution import EncodedImage, Latency, LRUCache, VLMRunner, synchronized_time
from verl_ext.controller.network import BudgetController, Logits
from verl_ext.controller.source import ControllerSource
from verl_ext.controller.space import Configuration
from verl_ext.controller.vlm import ControlledModel, default_device, load_controller
from verl_ext.data.image_questions import placeholder_in, to_rgb, why_not_processable
from verl_ext.plugins import Plugin

MAX_CACHED_BUDGETS = 256
"""Maximum number of budgets with cached features; each takes half a kilobyte, and a service uses only a few."""
TRACE_WARM_UPS = 3
"""Runs during which torch's interpreter optimizes a traced network; the first two are slow."""


class _QuestionNetwork(nn.Module):
    """The part of a controller that depends on the question; `torch.jit` traces the `forward` of a module."""

    def __init__(self, controller: BudgetController) -> None:
        super().__init__()
        self._controller = controller

    def forward(self, vision: torch.Tensor, language: torch.Tensor, budget: torch.Tensor) -> Logits:
        """Compute `BudgetController.logits`."""
        return self._controller.logits(vision, language, budget)


class TracedController:
    """Computes the logits of a controller with constant weights, with less overhead.

    A controller is so small that Python takes more time between its operations than torch within them. So the network
    runs as a traced graph, and the features of a budget are cached, because they do not depend on the question. The
    controller must be in evaluation mode and on its final device.
    """

    def __init__(self, controller: BudgetController) -> None:
        self._controller, self._device = controller, next(controller.parameters()).device
        self._budgets: LRUCache[torch.Tensor] = LRUCache(MAX_CACHED_BUDGETS)
        config = controller.config
        widths = config.vision_width, config.language_width
        vision, language = (torch.zeros(1, width, device=self._device) for width in widths)
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            example = vision, language, self._budget_features(config.low_ms)
            traced = torch.jit.trace(_QuestionNetwork(controller).eval(), example)
            self._network = torch.jit.optimize_for_inference(traced)
            for _ in range(TRACE_WARM_UPS):
                self._network(*example)

    def __call__(self, vision: torch.Tensor, language: torch.Tensor, budget_ms: float) -> Logits:
        """The logits of `BudgetController.forward` for a batch of one, in float32; call it in inference mode."""
        return self._network(vision, language, self._budget_features(budget_ms))

    def _budget_features(self, budget_ms: float) -> torch.Tensor:
        def make() -> torch.Tensor:
            return self._controller.budget_features(torch.tensor([budget_ms], device=self._device))

        return self._budgets.get(budget_ms, make)


@dataclass(frozen=True)
class Decision:
    """A configuration and the time of choosing it, without encoding the image at the lowest tier.

    Attributes:
        configuration: the most likely configuration.
        features_ms: time to pool the encoded image and to embed the question.
        network_ms: time of the controller's forward pass.
        choice_ms: time to compute the mode of the distribution.
    """

    configuration: Configuration
    features_ms: float
    network_ms: float
    choice_ms: float

    @property
    def deciding_ms(self) -> float:
        """Sum of the parts."""
        return self.features_ms + self.network_ms + self.choice_ms


def decision_ms_of(configuration: Configuration, deciding_ms: float, low_encode_ms: float) -> float:
    """Time that a decision of `deciding_ms` adds to the latency of the chosen configuration.

    This includes encoding the image at the lowest tier, except for a configuration of that tier, which reuses the
    encoding for its answer.
    """
    return deciding_ms + (low_encode_ms if configuration.tier else 0.0)


@dataclass(frozen=True)
class AdaptiveAnswer:
    """An answer with its configuration and time.

    Attributes:
        decision_ms: time that the decision adds, see `decision_ms_of`.
        network_ms: time of the controller's forward pass, part of `decision_ms`.
        latency: latency of the configuration, including the encoding of the image at its tier.
    """

    answer: str
    configuration: Configuration
    decision_ms: float
    network_ms: float
    latency: Latency

    @property
    def total_ms(self) -> float:
        """Time for deciding and answering."""
        return self.decision_ms + self.latency.total_ms


class AdaptiveModel:
    """Answers each question with the part of the model that the controller chooses; moves it to the model's device.

    Attributes:
        space: the configurations that the controller can choose.
        trained_ms: lowest and highest budget in the controller's training.
    """

    def __init__(self, runner: VLMRunner, controller: BudgetController) -> None:
        self.runner, self._device = runner, runner.adapter.model.device
        self._network = TracedController(controller.to(self._device).eval())
        self.space, self.trained_ms = controller.space, (controller.config.low_ms, controller.config.high_ms)

    def answer(self, image: Image.Image, question: str, budget_ms: float) -> AdaptiveAnswer:
        """Choose a configuration and answer a question with it.

        Args:
            image: an image that `to_rgb` accepts.
            question: the full text of the question, including the controller's `question_suffix`.
            budget_ms: latency budget of the answer; outside `trained_ms`, the choice may be poor.

        Raises:
            ValueError: the budget is not a positive finite number, the question is empty or contains the model's token
                of an image or video, or the image is empty, has an aspect ratio above `MAX_ASPECT_RATIO`, or has a
                brightness without a known range.
        """
        if not isinstance(budget_ms, Real) or not 0 < budget_ms < math.inf:
            raise ValueError(f"budget_ms is {budget_ms!r}; it must be a positive number of milliseconds")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"question is {question!r}; it must be text that is not empty")
        if token := placeholder_in([question], self.runner.adapter.processor):
            raise ValueError(f"the question contains {token}, which the model reads as an image or video; remove it")
        image = to_rgb(image)
        if problem := why_not_processable(image):
            raise ValueError(f"the image {problem}")
        low = self.runner.encode(image, question, 0)
        decision = self.decide(low, question, budget_ms)
        configuration = decision.configuration
        encoded = self.runner.encode(image, question, configuration.tier) if configuration.tier else low
        result = self.runner.answer(encoded, configuration)
        decision_ms = decision_ms_of(configuration, decision.deciding_ms, low.vision_ms)
        return AdaptiveAnswer(result.answer, configuration, decision_ms, decision.network_ms, result.latency)

    @torch.inference_mode()
    def decide(self, low: EncodedImage, question: str, budget_ms: float) -> Decision:
        """Choose a configuration; `low` is the image at the lowest tier. See `answer` for the other arguments."""
        adapter, times = self.runner.adapter, [synchronized_time(self._device)]
        vision, language = adapter.pooled_vision(low.encoding), adapter.pooled_language(question)
        times.append(synchronized_time(self._device))
        logits = self._network(vision.float()[None], language.float()[None], budget_ms)
        times.append(synchronized_time(self._device))
        # on the CPU, because launching these small operations on a GPU takes longer than running them
        choices = ConfigurationDistribution(self.space, *(each.cpu() for each in logits)).mode()
        [configuration] = choices.configurations(self.space)
        times.append(synchronized_time(self._device))
        return Decision(configuration, *(1e3 * (end - start) for start, end in zip(times, times[1:])))


def load_adaptive_model(
    source: ControllerSource,
    vlm: str | None = None,
    device: str | None = None,
    trust_remote_code: bool = False,
    custom_adapter: Plugin | None = None,
) -> tuple[AdaptiveModel, ControlledModel]:
    """Load a controller and the model that it was trained for.

    Args:
        vlm: path of the vision-language model; None for its path in training.
        device: cpu or cuda; None for a GPU if there is one.
        trust_remote_code: whether the model's own code may run.
        custom_adapter: see `ControlledModel.runner`.

    Raises:
        UserError: the controller or its model cannot be loaded, or they do not belong together.
    """
    controller, controlled = load_controller(source.export, vlm, trust_remote_code)
    setting = source.setting("controller", "dtype") or "auto"
    default, dtype = default_device(controlled.dtype if setting == "auto" else setting)
    runner = controlled.runner(default if device is None else device, dtype, custom_adapter)
    return AdaptiveModel(runner, controller), controlled
