"""vLLM in a process of its own, so that the process that asks stays small and can start judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.engines.engine import Engine
from eval_pipeline.engines.messages import Abandon, Alive, Answered, Ask, Done, Load, Loaded, Refused
from eval_pipeline.engines.vllm_child import VllmChild
from verl_ext.errors import UserError


class VllmEngine(Engine):
    """The model in a child process, which stays loaded from one call of `answers` to the next.

    For the same list of requests in one call, greedy answers are the same bit for bit on one machine with the same
    settings: all are added before the first step, in order, and the prefix cache begins empty. Another list may move
    logits by about 1e-6 in float32 and more in bfloat16, which changes an answer where two tokens are as likely.

    Args:
        settings: of the engine.
        export: Hugging Face model directory with a chat template.
    """

    def __init__(self, settings: EngineConfig, export: Path) -> None:
        self._settings, self._export = settings, export
        self._child: VllmChild  # once the context is entered

    def __enter__(self) -> VllmEngine:
        self._child = VllmChild(self._settings.timeout_s)
        try:
            self._child.send(Load(self._settings, str(self._export)))
            message = self._child.receive(is_loading=True)
            if isinstance(message, Refused):
                raise UserError(message.reason)
        except BaseException:
            self._child.end()
            raise
        assert isinstance(message, Loaded)
        self.protocol, self.seconds = message.protocol, {**message.seconds, "generate_s": 0.0}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.end()

    def answers(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[tuple[Request, Answer]]:
        """See `Engine`."""
        self._child.send(Ask(tuple(requests), sampling))
        try:
            for message in self._answered():
                yield requests[message.index], message.answer
        except GeneratorExit:
            if self._child.is_open:
                self._stop()
            raise

    def _stop(self) -> None:
        self._child.send(Abandon())
        for _ in self._answered():
            pass  # finished before the child read that nobody wants it

    def _answered(self) -> Iterator[Answered]:
        message = self._child.receive()
        while not isinstance(message, Done):
            if not isinstance(message, Alive):
                yield message
            message = self._child.receive()
        self.seconds["generate_s"] += message.seconds
