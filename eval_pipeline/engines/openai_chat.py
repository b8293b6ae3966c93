"""One answer from a server, asked for again while that may help, and whose fault it is when none comes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from eval_pipeline.config import SamplingConfig
from eval_pipeline.engines.answer import Answer, Request
from eval_pipeline.engines.engine import EngineDied
from eval_pipeline.engines.openai_errors import is_refusal, may_be_the_prompts, may_pass, pause_after, status_of
from eval_pipeline.engines.openai_server import LOOK_S, OpenAIServer
from eval_pipeline.engines.seeds import seed_of

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

NUM_RETRIES = 6
"""After a busy server (429), a broken one (5xx) or a lost connection; 23 s in all, or as long as the server asks."""
ORDINARY = Request("", "What is 1 + 1?")
"""What any server can answer that can answer at all."""


class Chat:
    """A model on a server. May be used by several threads.

    Args:
        server: has the model.
        model: its name there.
        timeout_s: for one answer, with all that is tried for it.
    """

    def __init__(self, server: OpenAIServer, model: str, timeout_s: float) -> None:
        self._server, self._model, self._timeout_s = server, model, timeout_s
        self._has_answered = False

    def answer(self, request: Request, sampling: SamplingConfig) -> Answer:
        """Ask for an answer.

        An answer with an `error` is kept for good, so there is one only where the prompt is to blame: the server
        refuses it, or fails on it again and again and answers another prompt before and after.

        Raises:
            EngineDied: the server is to blame.
        """
        import openai

        try:
            return self._answer(request, sampling, time.monotonic() + self._timeout_s)
        except (openai.APIError, ValueError) as error:
            raise EngineDied(self._why(error)) from error

    def _answer(self, request: Request, sampling: SamplingConfig, deadline: float) -> Answer:
        import openai

        try:
            return self._ask_patiently(request, sampling, deadline)
        except (openai.APIError, ValueError) as error:
            if not may_be_the_prompts(error):
                raise
            return self._blame(error, request, sampling, deadline)

    def _blame(self, error: Exception, request: Request, sampling: SamplingConfig, deadline: float) -> Answer:
        """The request's answer after all, or one that says why there is none."""
        import openai

        if is_refusal(error):
            if not self._has_answered:  # a server that refuses everybody has a quarrel with the settings
                self._ask(ORDINARY, sampling, deadline)
            return self._no_answer(error)
        self._ask(ORDINARY, sampling, deadline)
        try:
            return self._ask(request, sampling, deadline)  # it may have been down until just now
        except (openai.APIError, ValueError) as again:
            if not may_be_the_prompts(again):
                raise
            self._ask(ORDINARY, sampling, deadline)
            return self._no_answer(again)

    def _ask_patiently(self, request: Request, sampling: SamplingConfig, deadline: float) -> Answer:
        import openai

        attempt = 0
        while True:
            try:
                return self._ask(request, sampling, deadline)
            except openai.APIError as error:
                pause = pause_after(error, attempt)
                if not may_pass(error) or attempt == NUM_RETRIES or time.monotonic() + pause >= deadline:
                    raise
            time.sleep(pause)
            attempt += 1

    def _ask(self, request: Request, sampling: SamplingConfig, deadline: float) -> Answer:
        import openai

        try:
            completion = self._complete(request, sampling, deadline, max_tokens=sampling.max_tokens)
        except openai.BadRequestError as error:
            if "context length" not in str(error):
                raise
            # prompt and answer together would be too long: without a limit the server takes what is left, which is less
            completion = self._complete(request, sampling, deadline)
        answer = _read(completion)
        self._has_answered = True
        return answer

    def _complete(self, request: Request, sampling: SamplingConfig, deadline: float, **limit: int) -> ChatCompletion:
        import openai

        seed, left = seed_of(request, sampling), max(deadline - time.monotonic(), 0.01)
        arguments: dict[str, Any] = {
            "model": self._model,
            "messages": [{"role": "user", "content": request.prompt}],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": openai.omit if seed is None else seed,
        }
        timeout = openai.Timeout(left, connect=min(left, LOOK_S))
        return self._server.client.chat.completions.create(**arguments, **limit, timeout=timeout)

    def _no_answer(self, error: Exception) -> Answer:
        return Answer("", 0, False, error=self._server.say(error))

    def _why(self, error: Exception) -> str:
        import openai

        said = f"{self._server.url} does not answer ({self._server.say(error)})"
        if isinstance(error, openai.APITimeoutError):
            return f"{said}; an answer may take engine.timeout_s={self._timeout_s:g} seconds, raise it for slow models"
        return f"{said}; lower engine.concurrency" if status_of(error) == 429 else said


def _read(completion: ChatCompletion) -> Answer:
    from openai.types.chat import ChatCompletion

    # the package hands on any page that a proxy may send in its place
    if not isinstance(completion, ChatCompletion) or not completion.choices or completion.usage is None:
        raise ValueError("the server's reply lacks an answer or its token count")
    choice, num_tokens = completion.choices[0], completion.usage.completion_tokens
    return Answer(choice.message.content or "", num_tokens, truncated=choice.finish_reason == "length")
