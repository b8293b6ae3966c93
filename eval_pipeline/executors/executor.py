"""What the driver needs of those who do the work."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType

from eval_pipeline.config import EvalConfig
from eval_pipeline.work.batch import Batch, Event
from verl_ext.commands import require_package

BATCHES_PER_WORKER = 2
"""One that the engine answers, and one whose last answers are being judged."""


class Executor(ABC):
    """Workers, each with an engine and a judge; leaving the context ends them all."""

    @abstractmethod
    def __enter__(self) -> Executor: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def has_room_for(self, export: Path | None) -> bool:
        """Whether a batch for this model would be begun soon, without another model being unloaded for it."""

    @abstractmethod
    def submit(self, batch: Batch) -> None:
        """Give a batch to a worker that has room for it."""

    @abstractmethod
    def events(self, timeout_s: float) -> list[Event]:
        """What has happened; waits for the first event, so many seconds at most."""


def require_engine(recipe: EvalConfig) -> None:
    """Refuse a recipe whose workers on this machine need vLLM if it is not installed.

    Raises:
        UserError: it is missing; the message names the command that installs it.
    """
    if recipe.executor.kind == "local" and recipe.engine.kind == "vllm":
        require_package("vllm")


def open_executor(recipe: EvalConfig) -> Executor:
    """The executor that a recipe asks for."""
    if recipe.executor.kind == "ray":
        from eval_pipeline.executors.ray import RayExecutor  # Ray takes seconds to import

        return RayExecutor(recipe)
    from eval_pipeline.executors.local import LocalExecutor

    return LocalExecutor(recipe)
