"""Runs configurations on samples, measures their latency, and caches repeated computations."""

from __future__ import annotations

import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from PIL import Image
from torch import nn
from torch.utils.hooks import RemovableHandle

from verl_ext.controller.adapters import Inputs, VLMAdapter
from verl_ext.controller.space import Configuration, ConfigurationSpace
from verl_ext.data.image_questions import ImageQuestion

MAX_CACHED_RESULTS = 1 << 20
NUM_WARM_UPS = 3
"""Warm-up runs at each tier before measurements."""
T = TypeVar("T")


@dataclass(frozen=True)
class Latency:
    """The parts of a generation's latency.

    Attributes:
        vision_ms: time to encode the image; 0 if the encoding was cached.
        prefill_ms: time to process the prompt, from the embeddings to the logits of the first token.
        decode_ms: time to decode all further tokens.
        num_decoded: number of further tokens.
    """

    vision_ms: float
    prefill_ms: float
    decode_ms: float
    num_decoded: int

    @property
    def total_ms(self) -> float:
        """Sum of the parts."""
        return self.vision_ms + self.prefill_ms + self.decode_ms


def median_latency(latencies: Sequence[Latency]) -> Latency:
    """The median of each part over repetitions of a generation."""
    parts = zip(*(astuple(each)[:3] for each in latencies))
    vision_ms, prefill_ms, decode_ms = map(statistics.median, parts)
    return Latency(vision_ms, prefill_ms, decode_ms, latencies[0].num_decoded)


def synchronized_time(device: torch.device) -> float:
    """The time in seconds, after synchronizing with the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class LatencyMeter:
    """Measures the forward passes of a generation within a `with` block, with hooks on model and vision encoder."""

    def __init__(self, adapter: VLMAdapter) -> None:
        self._adapter = adapter
        self._vision_s: list[float] = []
        self._model_s: list[float] = []

    def __enter__(self) -> LatencyMeter:
        self._hooks = [
            *self._add_hooks(self._adapter.vision_encoder, self._vision_s),
            *self._add_hooks(self._adapter.model, self._model_s),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _add_hooks(self, module: nn.Module, seconds: list[float]) -> list[RemovableHandle]:
        started: list[float] = []

        def before(*_: Any) -> None:
            started.append(synchronized_time(self._adapter.model.device))

        def after(*_: Any) -> None:
            seconds.append(synchronized_time(self._adapter.model.device) - started.pop())

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    @property
    def vision_ms(self) -> float:
        """Time spent encoding images in the block."""
        return 1e3 * sum(self._vision_s)

    @property
    def latency(self) -> Latency:
        """Latency of the generation in the block."""
        first, *further = self._model_s
        return Latency(self.vision_ms, 1e3 * first - self.vision_ms, 1e3 * sum(further), len(further))


@dataclass(frozen=True)
class RunWorkload:
    """The amount of work in a run, from which a latency model predicts the latency.

    Attributes:
        num_patches: number of patches for the vision encoder.
        num_prompt_tokens: number of prompt tokens, including image tokens.
        num_decoded: number of generated tokens after the first.
    """

    configuration: Configuration
    num_patches: int
    num_prompt_tokens: int
    num_decoded: int


@dataclass(frozen=True)
class RunResult:
    """The result of running a configuration on a sample; `latency` is measured and includes encoding the image."""

    answer: str
    latency: Latency
    workload: RunWorkload


@dataclass(frozen=True)
class EncodedImage:
    """A question with its image, encoded at a tier.

    Attributes:
        inputs: inputs of the model.
        num_patches: number of patches for the vision encoder.
        encoding: output of the vision encoder.
        vision_ms: time to encode the image.
    """

    inputs: Inputs
    num_patches: int
    encoding: Any
    vision_ms: float


class LRUCache(Generic[T]):
    """A cache that drops the least recently used entry, and counts lookups and hits."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries, self._entries = max_entries, OrderedDict[Hashable, T]()
        self.num_lookups = self.num_hits = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The entry of a key; the first call creates it with `make`."""
        self.num_lookups += 1
        if key in self._entries:
            self.num_hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]
        entry = self._entries[key] = make()
        if len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
        return entry


class VLMRunner:
    """Answers questions with given configurations, one at a time.

    Computes the features of a sample once, encodes its image once per tier, and runs a configuration once per sample.
    Decoding is greedy, so repeating a run would give the same answer.

    Args:
        max_encodings: maximum number of encoded images to cache on the device.
        warms_up: whether to run the full model once at each new input size before measuring, because the first run at
            an input size is slower.
    """

    def __init__(
        self, adapter: VLMAdapter, max_new_tokens: int, max_encodings: int = 256, warms_up: bool = False
    ) -> None:
        self.adapter, self._max_new_tokens, self._warms_up = adapter, max_new_tokens, warms_up
        self._seen_sizes: set[tuple[int, int]] = set()
        self._end_tokens = adapter.end_tokens
        self.results: LRUCache[RunResult] = LRUCache(MAX_CACHED_RESULTS)
        self._encoded: LRUCache[EncodedImage] = LRUCache(max_encodings)
        self._features: LRUCache[tuple[torch.Tensor, torch.Tensor]] = LRUCache(MAX_CACHED_RESULTS)

    def features(self, sample: ImageQuestion) -> tuple[torch.Tensor, torch.Tensor]:
        """Controller inputs on the CPU: image features (vision_width,) at the lowest tier, and question (width,)."""

        def make() -> tuple[torch.Tensor, torch.Tensor]:
            encoding = self.encoded(sample, 0).encoding
            vision, language = self.adapter.pooled_vision(encoding), self.adapter.pooled_language(sample.question)
            return vision.float().cpu(), language.float().cpu()

        return self._features.get(sample.sample_id, make)

    def encoded(self, sample: ImageQuestion, tier: int) -> EncodedImage:
        """A sample's image, encoded at a tier; cached."""
        return self._encoded.get(
            (sample.sample_id, tier), lambda: self.encode(sample.load_image(), sample.question, tier)
        )

    def run(self, sample: ImageQuestion, configuration: Configuration) -> RunResult:
        """Run a configuration on a sample; cached.

        Raises:
            UserError: the image cannot be read.
        """
        return self.results.get(
            (sample.sample_id, configuration),
            lambda: self.answer(self.encoded(sample, configuration.tier), configuration),
        )

    def run_uncached(self, sample: ImageQuestion, configuration: Configuration) -> RunResult:
        """Like `run`, without reading or writing a cache."""
        return self.answer(self.encode(sample.load_image(), sample.question, configuration.tier), configuration)

    @torch.no_grad()
    def reference_loss(self, sample: ImageQuestion, configuration: Configuration) -> float:
        """Mean negative log-likelihood of a sample's first reference, in nats per token."""
        encoded = self.encoded(sample, configuration.tier)
        reference = self.adapter.tokenizer(sample.references[0], add_special_tokens=False)["input_ids"]
        total = 0.0
        with self.adapter.configured(configuration), self.adapter.with_encoding(encoded.encoding):
            state = self.adapter.prefill(encoded.inputs)
            for position, token in enumerate(reference):
                total -= float(state.logits[0].float().log_softmax(-1)[token])
                if position + 1 < len(reference):
                    state = self.adapter.decode(state, torch.tensor([[token]], device=state.logits.device))
        return total / len(reference)

    def encode(self, image: Image.Image, question: str, tier: int) -> EncodedImage:
        """Encode an RGB image at a tier, with the full text of a question."""
        inputs = self.adapter.inputs(image, question, tier)
        size = self.adapter.num_patches(inputs), inputs["input_ids"].shape[1]
        if self._warms_up and size not in self._seen_sizes:
            self._seen_sizes.add(size)
            with self.adapter.with_encoding(self.adapter.encode(inputs)):
                self.adapter.generate(inputs, self._max_new_tokens, self._end_tokens)
        with LatencyMeter(self.adapter) as meter:
            encoding = self.adapter.encode(inputs)
        return EncodedImage(inputs, size[0], encoding, meter.vision_ms)

    def answer(self, encoded: EncodedImage, configuration: Configuration) -> RunResult:
        """Answer a question whose image is encoded at the configuration's tier."""
        with (
            self.adapter.configured(configuration),
            self.adapter.with_encoding(encoded.encoding),
            LatencyMeter(self.adapter) as meter,
        ):
            tokens = self.adapter.generate(encoded.inputs, self._max_new_tokens, self._end_tokens)
        latency = replace(meter.latency, vision_ms=encoded.vision_ms)
        answer = self.adapter.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        num_prompt_tokens = encoded.inputs["input_ids"].shape[1]
        workload = RunWorkload(configuration, encoded.num_patches, num_prompt_tokens, latency.num_decoded)
        return RunResult(answer, latency, workload)

    def warm_up(self, image: Image.Image, question: str, space: ConfigurationSpace) -> None:
        """Run all blocks at each tier, because the first run at an input size is slower."""
        for tier in range(len(space.tiers)):
            self.answer(self.encode(image, question, tier), space.configuration(tier, [True] * space.num_blocks))
