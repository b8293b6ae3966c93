"""What is run for one sample."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from eval_pipeline.adaptive.canary import Canary
from verl_ext.controller.execution import EncodedImage, RunResult, median_latency
from verl_ext.controller.inference import AdaptiveModel, Decision
from verl_ext.controller.space import Configuration
from verl_ext.data.image_questions import ImageQuestion

T = TypeVar("T")


class SampleRuns:
    """Runs configurations for a sample, each of them once, whichever methods ask for it.

    Its image is encoded once for each tier, which counts for every configuration of that tier.

    Args:
        model: that runs.
        sample: a question.
        repeats: runs of each, of whose parts the medians count.
        cheapest: the least configuration, which runs first at each tier and does not count: the first one is not warm.
        canary: by which a disturbed run is made again.
    """

    def __init__(
        self, model: AdaptiveModel, sample: ImageQuestion, repeats: int, cheapest: Configuration, canary: Canary
    ) -> None:
        self.sample, self._model, self._repeats, self._cheapest = sample, model, repeats, cheapest
        self._canary = canary
        self._image = sample.load_image()
        self._seen: dict[int, EncodedImage] = {}
        self._outcomes: dict[Configuration, RunResult] = {}

    def seen(self, tier: int) -> EncodedImage:
        """The image at a tier."""
        if tier not in self._seen:
            self._seen[tier] = self._see(tier)
        return self._seen[tier]

    def run(self, configuration: Configuration) -> RunResult:
        """What a configuration gives."""
        if configuration not in self._outcomes:
            seen, answer = self.seen(configuration.tier), self._model.runner.answer
            found = self._measure(lambda: answer(seen, configuration))
            self._outcomes[configuration] = replace(found[0], latency=median_latency([each.latency for each in found]))
        return self._outcomes[configuration]

    def decide(self, budget_ms: float) -> Decision:
        """What the controller chooses for a budget, each time right behind an encoding of the image, as in use.

        Behind another decision it would find its weights in the processor's caches.
        """
        question, see = self.sample.question, self._model.runner.encode
        found = self._measure(lambda: self._model.decide(see(self._image, question, 0), question, budget_ms))
        parts = zip(*((each.features_ms, each.network_ms, each.choice_ms) for each in found))
        return Decision(found[0].configuration, *map(statistics.median, parts))

    def _measure(self, run: Callable[[], T]) -> list[T]:
        return [self._canary.calm(run) for _ in range(self._repeats)]

    def _see(self, tier: int) -> EncodedImage:
        see = self._model.runner.encode
        cold = see(self._image, self.sample.question, tier)
        self._model.runner.answer(cold, replace(self._cheapest, tier=tier))
        found = self._measure(lambda: see(self._image, self.sample.question, tier))
        return replace(found[0], vision_ms=statistics.median(each.vision_ms for each in found))
