"""Runs configurations for samples, and shares between them what is the same."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from PIL import Image

from verl_ext.controller.adapters.base import Inputs, VLMAdapter
from verl_ext.controller.configuration import Configuration
from verl_ext.controller.latency import Latency, LatencyMeter
from verl_ext.controller.latency_model import Workload
from verl_ext.data.image_questions import ImageQuestion

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """What a configuration gave for a sample.

    Attributes:
        answer: the text.
        latency: as measured, the encoding of the image included.
        workload: what had to be done, by which a latency model tells how long it takes.
    """

    answer: str
    latency: Latency
    workload: Workload


@dataclass(frozen=True)
class Seen:
    """An image at a tier.

    Attributes:
        inputs: what the model reads.
        encoding: by the vision encoder.
        vision_ms: how long that took.
    """

    inputs: Inputs
    encoding: Any
    vision_ms: float


class LastUsed(Generic[T]):
    """Results of which the last used are kept.

    Args:
        most: of them.
    """

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, OrderedDict[Hashable, T]()
        self.num_asked = self.num_found = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is kept under a key, or else what `make` gives, which is kept from now on."""
        self.num_asked += 1
        if key in self._kept:
            self.num_found += 1
            self._kept.move_to_end(key)
            return self._kept[key]
        found = self._kept[key] = make()
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return found


class Executor:
    """Answers questions under configurations, one at a time.

    The features of a sample are made once, its image is encoded once for each tier, and a configuration that was run
    for it before is not run again. The answers are the likeliest ones, so that a repetition would give the same.

    Args:
        adapter: of the model.
        max_new_tokens: of an answer.
        most_outcomes: results that are kept.
        most_encodings: encoded images that are kept.
    """

    def __init__(
        self, adapter: VLMAdapter, max_new_tokens: int, most_outcomes: int = 1 << 20, most_encodings: int = 256
    ) -> None:
        self.adapter, self._max_new_tokens = adapter, max_new_tokens
        self._end_tokens = adapter.end_tokens
        self.outcomes: LastUsed[Outcome] = LastUsed(most_outcomes)
        self._seen: LastUsed[Seen] = LastUsed(most_encodings)
        self._features: LastUsed[tuple[torch.Tensor, torch.Tensor]] = LastUsed(most_outcomes)

    def features(self, sample: ImageQuestion) -> tuple[torch.Tensor, torch.Tensor]:
        """What the controller sees: (vision width,) of the lowest tier and (width,) of the question, on the CPU."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            encoding = self.seen(sample, 0).encoding
            vision, language = self.adapter.pooled_vision(encoding), self.adapter.pooled_language(sample.question)
            return vision.float().cpu(), language.float().cpu()

        return self._features.get(sample.sample_id, make)

    def seen(self, sample: ImageQuestion, tier: int) -> Seen:
        """A sample's image, encoded at a tier."""
        return self._seen.get((sample.sample_id, tier), lambda: self.see(sample.load_image(), sample.question, tier))

    def run(self, sample: ImageQuestion, configuration: Configuration) -> Outcome:
        """What a configuration gives for a sample.

        Raises:
            UserError: its image cannot be read.
        """
        return self.outcomes.get(
            (sample.sample_id, configuration),
            lambda: self.answer(self.seen(sample, configuration.tier), configuration),
        )

    def run_anew(self, sample: ImageQuestion, configuration: Configuration) -> Outcome:
        """The same with nothing taken from what ran before, and nothing kept."""
        return self.answer(self.see(sample.load_image(), sample.question, configuration.tier), configuration)

    def look_anew(self, sample: ImageQuestion) -> float:
        """Milliseconds of encoding an image at the lowest tier, measured now."""
        return self.see(sample.load_image(), sample.question, 0).vision_ms

    def see(self, image: Image.Image, question: str, tier: int) -> Seen:
        """Encode an image at a tier.

        Args:
            image: in RGB.
            question: as the model is asked.
            tier: place in the list of tiers.
        """
        inputs = self.adapter.inputs(image, question, tier)
        with LatencyMeter(self.adapter) as meter:
            encoding = self.adapter.encode(inputs)
        return Seen(inputs, encoding, meter.vision_ms)

    def answer(self, seen: Seen, configuration: Configuration) -> Outcome:
        """Answer a question about an image that was encoded at the configuration's tier.

        Args:
            seen: the image with its question.
            configuration: of the model.
        """
        with (
            self.adapter.configured(configuration),
            self.adapter.seeing(seen.encoding),
            LatencyMeter(self.adapter) as meter,
        ):
            tokens = self.adapter.generate(seen.inputs, self._max_new_tokens, self._end_tokens)
        measured = meter.latency
        latency = Latency(seen.vision_ms, measured.prefill_ms, measured.decode_ms, measured.num_decoded)
        answer = self.adapter.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        size = self.adapter.num_patches(seen.inputs), seen.inputs["input_ids"].shape[1]
        return Outcome(answer, latency, Workload(configuration, *size, measured.num_decoded))
