"""What an engine is, and how one is opened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from verl_ext.errors import UserError


class EngineDied(Exception):
    """The engine ended or hangs and its work is not done; another attempt may succeed. The message says why."""


class Engine(ABC):
    """Answers prompts. A context manager: entering starts it, leaving ends every process that it started.

    One call of `answers` at a time.
    """

    protocol: dict[str, Any]
    """What the figures depend on besides the sampling; for `metrics.json`. Known once the engine is started."""
    seconds: dict[str, float]
    """Wall-clock seconds so far of `import_s`, `load_s` and `generate_s`."""

    @abstractmethod
    def __enter__(self) -> Engine:
        """Start.

        Raises:
            UserError: the model or the server cannot be used, with the reason.
            EngineDied: the engine's process ended while it loaded the model.
        """

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def answers(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[tuple[Request, Answer]]:
        """Answer every request.

        Args:
            requests: in the order in which the engine takes them up.
            sampling: how to draw the answers; `num_samples` is the caller's, who makes a request for each.

        Yields:
            Each request with its answer, as soon as it is finished. A request that cannot be answered has an answer
            with an `error`. A caller that stops early leaves an engine that can be asked again.

        Raises:
            EngineDied: the engine's process ended or hangs, or the server does not answer any more.
        """


def open_engine(settings: EngineConfig, export: Path | None) -> Engine:
    """The engine that the settings ask for, not yet started.

    Args:
        settings: of the engine.
        export: Hugging Face model directory; a running server needs none, and must serve the one that is named.

    Raises:
        UserError: vLLM without a model.
    """
    # each is imported on demand: a server's client is of no use where vLLM answers, nor the other way round
    if settings.kind == "openai":
        from eval_pipeline.engines.openai_engine import OpenAIEngine

        return OpenAIEngine(settings, export)
    if export is None:
        raise UserError(
            "engine.kind=vllm needs a model; name a checkpoint, or set engine.kind=openai to use a running server"
        )
    from eval_pipeline.engines.vllm_engine import VllmEngine

    return VllmEngine(settings, export)
