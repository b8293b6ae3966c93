"""What a vLLM process and its owner say to each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines.answer import Answer, Request


@dataclass(frozen=True)
class Load:
    """To the process, first of all: load a model."""

    settings: EngineConfig
    model: str


@dataclass(frozen=True)
class Loaded:
    """From the process: it can be asked."""

    protocol: dict[str, Any]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Refused:
    """From the process: the model cannot be used."""

    reason: str


@dataclass(frozen=True)
class Ask:
    """To the process: answer these."""

    requests: Sequence[Request]
    sampling: SamplingConfig


@dataclass(frozen=True)
class Abandon:
    """To the process: no more answers to the last `Ask` are wanted."""


@dataclass(frozen=True)
class Answered:
    """From the process: one answer."""

    index: int
    """Of the request in its `Ask`."""
    answer: Answer


@dataclass(frozen=True)
class Alive:
    """From the process: the work goes on, though no answer was finished lately."""


@dataclass(frozen=True)
class Done:
    """From the process: nothing more comes for the last `Ask`."""

    seconds: float
    """Wall-clock time that it took."""
