"""A running server that speaks OpenAI's chat completions protocol."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.engines.engine import Engine
from eval_pipeline.engines.openai_chat import Chat
from eval_pipeline.engines.openai_server import OpenAIServer


class OpenAIEngine(Engine):
    """Requests go out from threads, `concurrency` at a time.

    The server decides which requests share a batch, so that a greedy answer may change where two tokens are as likely.
    It also applies its own defaults to what the protocol leaves open: vLLM's server takes penalties and top_k from the
    model's generation_config.json unless it is started with `--generation-config vllm`.

    Args:
        settings: of the engine.
        export: directory that the server must say its model was loaded from; None takes what `engine.model` names.
    """

    def __init__(self, settings: EngineConfig, export: Path | None) -> None:
        self._settings, self._export = settings, export

    def __enter__(self) -> OpenAIEngine:
        started = time.monotonic()
        import openai

        imported = time.monotonic()
        self._server = OpenAIServer(self._settings)
        card = self._server.card(self._export)
        self._chat = Chat(self._server, card.id, self._settings.timeout_s)
        self.protocol = {
            "engine": f"openai {openai.__version__}",
            "base_url": self._settings.base_url,
            "model": card.id,
            "root": card.root,
            "max_model_len": card.max_model_len,
        }
        self.seconds = {
            "import_s": imported - started,
            "load_s": time.monotonic() - imported,
            "generate_s": 0.0,
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)

    def answers(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[tuple[Request, Answer]]:
        """See `Engine`."""
        started = time.monotonic()
        waiting: SimpleQueue[Request] = SimpleQueue()
        stop = threading.Event()
        finished: SimpleQueue[tuple[Request, Answer | Exception]] = SimpleQueue()
        for request in requests:
            waiting.put(request)
        # daemons, unlike those of a thread pool: nobody waits for an answer under way when the evaluation ends
        for _ in range(min(self._settings.concurrency, len(requests))):
            threading.Thread(target=self._work, args=(waiting, finished, sampling, stop), daemon=True).start()
        try:
            for _ in requests:
                request, answer = finished.get()
                if isinstance(answer, Exception):
                    raise answer
                yield request, answer
        finally:
            stop.set()
            self.seconds["generate_s"] += time.monotonic() - started

    def _work(
        self, waiting: SimpleQueue, finished: SimpleQueue, sampling: SamplingConfig, stop: threading.Event
    ) -> None:
        while not stop.is_set():
            try:
                request = waiting.get_nowait()
            except Empty:
                return
            try:
                finished.put((request, self._chat.answer(request, sampling)))
            except Exception as error:  # raised again by whoever waits for the answers
                finished.put((request, error))
