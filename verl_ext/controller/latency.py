"""How long a model takes, in its parts, as hooks on its forward passes see it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn

from verl_ext.controller.adapters.base import VLMAdapter


@dataclass(frozen=True)
class Latency:
    """Milliseconds of one generation.

    Attributes:
        vision_ms: encoding the image; 0 when its encoding was at hand.
        prefill_ms: the prompt, from the embeddings to the first token's logits.
        decode_ms: all further tokens.
        num_decoded: how many those were.
    """

    vision_ms: float
    prefill_ms: float
    decode_ms: float
    num_decoded: int

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.vision_ms + self.prefill_ms + self.decode_ms


def median_of(latencies: Sequence[Latency]) -> Latency:
    """The median of each part over repetitions of one generation."""
    parts = zip(*(astuple(each)[:3] for each in latencies))
    vision_ms, prefill_ms, decode_ms = map(statistics.median, parts)
    return Latency(vision_ms, prefill_ms, decode_ms, latencies[0].num_decoded)


def now(device: torch.device) -> float:
    """Seconds on a clock that waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class LatencyMeter:
    """Times the forward passes inside a `with` block, by hooks on the model and its vision encoder.

    Args:
        adapter: of the model; one generation is timed at a time.
    """

    def __init__(self, adapter: VLMAdapter) -> None:
        self._adapter = adapter
        self._seconds: dict[str, list[float]] = {"vision": [], "model": []}
        self._hooks = ExitStack()

    def __enter__(self) -> LatencyMeter:
        self._seconds = {"vision": [], "model": []}
        with ExitStack() as hooks:
            for name, module in (("vision", self._adapter.vision_encoder), ("model", self._adapter.model)):
                for remove in self._watch(module, self._seconds[name]):
                    hooks.callback(remove)
            self._hooks = hooks.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _watch(self, module: nn.Module, seconds: list[float]) -> list[Callable[[], None]]:
        started: list[float] = []

        def begin(*_: Any) -> None:
            started.append(now(self._adapter.model.device))

        def end(*_: Any) -> None:
            seconds.append(now(self._adapter.model.device) - started.pop())

        return [module.register_forward_pre_hook(begin).remove, module.register_forward_hook(end).remove]

    @property
    def vision_ms(self) -> float:
        """Of encoding images in the block."""
        return 1e3 * sum(self._seconds["vision"])

    @property
    def latency(self) -> Latency:
        """Of the generation that the block saw."""
        first, *further = self._seconds["model"]
        return Latency(self.vision_ms, 1e3 * first - self.vision_ms, 1e3 * sum(further), len(further))
