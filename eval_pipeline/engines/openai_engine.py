"""A running server with OpenAI's chat completions API. The client is imported on use."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import Engine, EngineDied, GeneratedAnswer, GenerateRequest, ServedModel, request_seed
from verl_ext.console import warn
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

CONNECT_TIMEOUT_S = 10.0
"""How long a server may take to accept a connection, or to list its models."""
NUM_RETRIES = 6
"""Retries if the server is busy (408, 409, 429) or fails (5xx), the connection is lost, or the reply is malformed:
0.5 s to 8 s apart, or as long as the server asks for, up to two minutes."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.5, 8.0
"""Pauses between the retries of a malformed reply, which the client does not retry; each is twice the one before."""
CONTROL_TIMEOUT_S = 60.0
"""How long the answer to the control prompt may take after another prompt has timed out."""
NUM_LISTED = 10
"""Maximum number of models that a message names."""
CONTROL_PROMPT = GenerateRequest("", "What is 1 + 1?")
"""A prompt that any working server can answer."""
REFUSALS = (400, 413, 422)
"""HTTP statuses of a request that the server understands and refuses."""
BUSY = (408, 409, 429)
"""HTTP statuses of a server that may answer later."""
MAX_TOKENS = ("max_tokens", "max_completion_tokens")
"""Names of the token limit; OpenAI's reasoning models accept only the second, and many servers only the first."""
API_DEFAULTS = {"temperature": 1, "top_p": 1}
"""OpenAI's values of parameters that a request lacks; some of its models refuse even these values."""
ADVICE = {
    "temperature": "set sampling.temperature=1",
    "top_p": "set sampling.top_p=1",
    "seed": "set sampling.temperature=0, with which no seed is sent",
}
"""What to do if the server does not support a parameter, or not with this value."""


Results = SimpleQueue[tuple[GenerateRequest, GeneratedAnswer] | BaseException]


class ErrorInReply(ValueError):
    """A reply with status 200 that reports an error instead of an answer."""


class OpenAIEngine(Engine):
    """Sends up to `concurrency` requests at a time.

    The server decides which requests share a batch, so a greedy answer may differ if two tokens are about equally
    likely. It also applies its own defaults to parameters outside the protocol: vLLM's server takes penalties and top_k
    from the model's generation_config.json unless it is started with `--generation-config vllm`.

    Args:
        export: directory that the server must have loaded; None takes the model that `engine.model` names.
    """

    def __init__(self, config: EngineConfig, export: Path | None) -> None:
        self._config, self._export = config, export

    def __enter__(self) -> OpenAIEngine:
        started = time.monotonic()
        import openai

        imported = time.monotonic()
        model = find_served_model(self._config, self._export)
        self._session = ServerSession(self._config, model.id)
        self.protocol = {
            "engine": f"openai {openai.__version__}",
            "base_url": self._config.base_url,
            "model": model.id,
            "root": model.root,
            "max_model_len": model.max_model_len,
        }
        self.seconds = {
            "import_s": imported - started,
            "load_s": time.monotonic() - imported,
            "generate_s": 0.0,
        }
        return self

    def __exit__(self, *_: object) -> None:
        pass  # every call of `answers` closes its connections

    def answers(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig
    ) -> Iterator[tuple[GenerateRequest, GeneratedAnswer]]:
        started, loop, results = time.monotonic(), asyncio.new_event_loop(), Results()
        task = loop.create_task(self._request_all(requests, sampling, results))

        def work() -> None:
            try:
                loop.run_until_complete(task)
            except (Exception, asyncio.CancelledError) as error:
                results.put(error)
            finally:
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.close()

        # in a thread, so that requests do not time out while the caller is busy between two answers
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            for _ in requests:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
            self.seconds["generate_s"] += time.monotonic() - started
            self._session.warn_of_reasoning(len(requests))

    async def _request_all(
        self, requests: Sequence[GenerateRequest], sampling: SamplingConfig, results: Results
    ) -> None:
        """Request every answer, `concurrency` at a time."""
        import openai

        limit = asyncio.Semaphore(self._config.concurrency)
        client = openai.AsyncOpenAI(
            base_url=self._config.base_url,
            api_key=_api_key(self._config) or "EMPTY",
            max_retries=NUM_RETRIES,
            timeout=openai.Timeout(None, connect=CONNECT_TIMEOUT_S),  # `ServerSession` limits the total time
        )

        async def answer(request: GenerateRequest) -> None:
            async with limit:
                try:
                    results.put((request, await self._session.answer(client, request, sampling)))
                except EngineDied as error:
                    results.put(error)

        async with client, asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(answer(request))


class ServerSession:
    """Requests answers from one model, and attributes failures to the prompt or to the server.

    Args:
        model: its name on the server.
    """

    def __init__(self, config: EngineConfig, model: str) -> None:
        self._config, self._model = config, model
        self._has_answered = self._has_warned = self._has_warned_of_reasoning = False
        self._num_only_reasoning = 0
        self._unsupported: set[str] = set()

    async def answer(self, client: AsyncOpenAI, request: GenerateRequest, sampling: SamplingConfig) -> GeneratedAnswer:
        """Request an answer.

        An answer with an `error` is final, so it is returned only if the prompt is at fault: the server refuses it, or
        fails on it repeatedly or does not answer it in time, but answers another prompt.

        Raises:
            EngineDied: the server is at fault.
        """
        import openai

        url, timeout_s = self._config.base_url, self._config.timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                try:
                    return await self._request(client, request, sampling)
                except (openai.APIError, ValueError) as error:
                    if not _may_be_prompts_fault(error):
                        raise
                    return await self._attribute_failure(error, client.with_options(max_retries=0), request, sampling)
        except TimeoutError as error:
            late = f"no answer within engine.timeout_s={timeout_s:g} seconds, including retries"
            try:
                async with asyncio.timeout(min(timeout_s, CONTROL_TIMEOUT_S)):
                    await self._request(client.with_options(max_retries=0), CONTROL_PROMPT, sampling)
            except (TimeoutError, openai.APIError, ValueError):
                raise EngineDied(f"{url} does not answer ({late}); raise engine.timeout_s for slow models") from error
            return GeneratedAnswer.failed(late)
        except (openai.APIError, ValueError) as error:
            raise EngineDied(f"{url} {_fault(error)} ({_describe(error, self._config)}){_advice(error)}") from error

    async def _attribute_failure(
        self, error: Exception, client: AsyncOpenAI, request: GenerateRequest, sampling: SamplingConfig
    ) -> GeneratedAnswer:
        """Return the answer if a retry succeeds, or the error if the prompt is at fault; raise if the server is."""
        import openai

        if _status(error) in REFUSALS:
            if not self._has_answered:  # a server that refuses every request rejects the settings
                await self._request(client, CONTROL_PROMPT, sampling)
            return GeneratedAnswer.failed(_describe(error, self._config))
        await self._request(client, CONTROL_PROMPT, sampling)
        try:
            return await self._request(client, request, sampling)  # the server may have just recovered
        except (openai.APIError, ValueError) as again:
            if not _may_be_prompts_fault(again):
                raise
            await self._request(client, CONTROL_PROMPT, sampling)
            return GeneratedAnswer.failed(_describe(again, self._config))

    async def _request(
        self, client: AsyncOpenAI, request: GenerateRequest, sampling: SamplingConfig
    ) -> GeneratedAnswer:
        """Request an answer; repeat the request while the reply is malformed."""
        import openai

        pause_s = FIRST_PAUSE_S
        for _ in range(NUM_RETRIES):
            try:
                return await self._request_once(client, request, sampling)
            except (openai.APIError, ValueError) as error:
                if not _is_malformed(error):
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return await self._request_once(client, request, sampling)

    async def _request_once(
        self, client: AsyncOpenAI, request: GenerateRequest, sampling: SamplingConfig
    ) -> GeneratedAnswer:
        import openai

        seed = request_seed(request, sampling)
        arguments: dict[str, Any] = {
            "model": self._model,
            "messages": request.messages,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_tokens,
        }
        if seed is not None:
            arguments["seed"] = seed
        if kwargs := self._config.chat_template_kwargs:
            arguments["extra_body"] = {"chat_template_kwargs": kwargs}
        for name in self._unsupported:
            arguments = _without(arguments, name)
        # parsed here, because the client accepts any page that a proxy may send instead
        create = client.chat.completions.with_raw_response.create
        while True:
            try:
                reply = await create(**arguments)
                break
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                supported = self._supported(arguments, error)
                if supported == arguments:
                    raise
                arguments = supported
        answer = self._answer_from(parse_json(reply.text))
        self._has_answered = True
        return answer

    def _supported(self, arguments: dict[str, Any], error: APIStatusError) -> dict[str, Any]:
        """An equivalent request that the server may accept; the same one if there is none."""
        if "context length" in str(error):
            # prompt and answer would be too long together; without a limit, the server generates what fits
            return {name: value for name, value in arguments.items() if name not in MAX_TOKENS}
        name = _unsupported_parameter(error)
        if name is None:
            return arguments
        self._unsupported.add(name)
        return _without(arguments, name)

    def _answer_from(self, reply: Any) -> GeneratedAnswer:
        """Read the JSON of a reply.

        Raises:
            ErrorInReply: it reports an error.
            ValueError: it is malformed.
        """
        match reply:
            case {"choices": [{"error": error}, *_]} | {"error": error} if error:  # OpenRouter | other proxies
                raise ErrorInReply(_message_of(error))
            case {"choices": [{"finish_reason": "error" | "abort" as finish_reason}, *_]}:  # vLLM, SGLang
                raise ErrorInReply(f"the server ended the answer with finish_reason {finish_reason!r}")
            case {"choices": [{"message": dict(message)} as choice, *_]}:
                text, finish_reason = _text_of(message.get("content")), choice.get("finish_reason")
            case _:
                raise ValueError("the server's reply lacks an answer")
        if finish_reason == "content_filter" and not text:
            return GeneratedAnswer.failed("the server's content filter removed the answer")
        if finish_reason == "stop" and not text.strip() and (reasoning := _reasoning_of(message)):
            self._num_only_reasoning += 1
            text = f"<think>{reasoning}</think>"  # as our own vLLM, which does not separate them, would return it
        return GeneratedAnswer(text, self._num_tokens_of(reply), truncated=finish_reason == "length")

    def warn_of_reasoning(self, num_requests: int) -> None:
        """Warn once, after some requests, if answers to them consist of reasoning only."""
        if self._num_only_reasoning and not self._has_warned_of_reasoning:
            self._has_warned_of_reasoning = True
            warn(
                f"{self._config.base_url} returned {self._num_only_reasoning} of {num_requests} answers without text "
                "after the reasoning, so the reasoning is judged; check that the server's reasoning parser fits the "
                "model"
            )

    def _num_tokens_of(self, reply: dict[str, Any]) -> int:
        match reply:
            case {"usage": {"completion_tokens": int(num_tokens)}}:
                return num_tokens
        if not self._has_warned:
            self._has_warned = True
            warn(f"{self._config.base_url} does not report the number of tokens; it counts as 0")
        return 0


def _reasoning_of(message: dict[str, Any]) -> str:
    """The reasoning that the server has separated from the answer; empty if there is none."""
    fields = (message.get(name) for name in ("reasoning_content", "reasoning"))  # older and newer servers
    return next((text for text in fields if isinstance(text, str)), "")


def _message_of(error: Any) -> Any:
    """The message of an error in a reply, or the whole error if it has none."""
    return isinstance(error, dict) and error.get("message") or error


def _text_of(content: Any) -> str:
    """The text of a message, which may have parts of several types, such as Mistral's `thinking` and `text`."""
    match content:
        case None:
            return ""
        case str():
            return content
        case [*parts]:
            texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
            return "".join(map(_text_of, texts))
        case _:
            raise ValueError("the server's reply has an answer that is not text")


def _unsupported_parameter(error: APIStatusError) -> str | None:
    """The parameter that the server does not support, or not with this value, according to its refusal.

    OpenAI names it in `param` and in the message, and FastAPI in `loc`. The token limit counts only if the server names
    the alternative.
    """
    said = f"{error} {error.body}"
    if not re.search(r"not support|unsupported|unrecognized|unknown name|extra_forbidden", said, re.IGNORECASE):
        return None
    names = ("max_tokens", *ADVICE) if "max_completion_tokens" in said else ADVICE
    return next((name for name in names if re.search(rf"\b{name}\b", said)), None)


def _without(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """The arguments without a parameter, or with its new name; unchanged if answers could differ."""
    rest = {each: value for each, value in arguments.items() if each != name}
    if name == "max_tokens" and name in arguments:
        return rest | {"max_completion_tokens": arguments[name]}
    return rest if arguments.get(name) == API_DEFAULTS.get(name) else arguments


def _fault(error: Exception) -> str:
    """What is wrong with a server, as the verb of a message."""
    if _is_malformed(error) and not isinstance(error, ErrorInReply):
        return "sends malformed replies"
    status = _status(error) or 0
    return "refuses requests" if 400 <= status < 500 and status not in BUSY else "does not answer"


def _advice(error: Exception) -> str:
    """What the user can set, as the end of a message; empty if unknown."""
    import openai

    if _status(error) == 429:
        return "; lower engine.concurrency"
    name = _unsupported_parameter(error) if isinstance(error, openai.APIStatusError) else None
    return f"; {ADVICE[name]}" if name in ADVICE else ""


def _status(error: Exception) -> int | None:
    """The HTTP status of an error; None without a reply."""
    import openai

    return error.status_code if isinstance(error, openai.APIStatusError) else None


def _is_malformed(error: Exception) -> bool:
    """Whether a reply was not the JSON of an answer."""
    import openai

    return isinstance(error, ValueError | openai.APIResponseValidationError)


def _may_be_prompts_fault(error: Exception) -> bool:
    """Whether the server refused the prompt, failed on it, closed the connection, or sent a malformed reply."""
    import openai

    status = _status(error) or 0
    is_lost = isinstance(error, openai.APIConnectionError)
    return status in REFUSALS or status >= 500 or is_lost or _is_malformed(error)


def find_served_model(config: EngineConfig, export: Path | None) -> ServedModel:
    """Find the model on the server.

    Args:
        export: directory that the server must have loaded; None takes the model that `engine.model` names.

    Raises:
        UserError: the server cannot be reached, rejects the key, or does not have exactly one such model.
    """
    url, wanted, models = config.base_url, config.model, _list_models(config)
    matching = [
        each for each in models if wanted in (None, each.id) and (export is None or each.is_loaded_from(export))
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(map(str, models[:NUM_LISTED])) or "none"
    if matching:
        raise UserError(f"{url} serves several models; set engine.model to one of them: {names}")
    if export is not None and any(wanted in (None, each.id) for each in models):
        raise UserError(
            f"{url} serves {names}, not {export}; start it with the absolute path of that directory, or omit "
            "--checkpoint to evaluate the model that it serves"
        )
    problem = f"does not serve {wanted}" if wanted else "serves no model"
    raise UserError(f"{url} {problem}; set engine.model to one of its models: {names}")


def _list_models(config: EngineConfig) -> list[ServedModel]:
    import openai

    url, key = config.base_url, _api_key(config)
    try:
        with openai.OpenAI(base_url=url, api_key=key or "EMPTY", timeout=CONNECT_TIMEOUT_S, max_retries=2) as client:
            # parsed here, because the client accepts any page as a list of models
            reply = client.models.with_raw_response.list()
            return [ServedModel.from_entry(entry) for entry in parse_json(reply.text)["data"]]
    except openai.APIConnectionError as error:
        raise UserError(f"no server answers at {url}; start it or correct engine.base_url") from error
    except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
        raise UserError(f"{url} rejects the key; store a valid one in the variable {config.api_key_env}") from error
    except (openai.APIError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{url} does not list its models ({_describe(error, config)}); correct engine.base_url, which often ends "
            "in /v1"
        ) from error


def _describe(error: Exception, config: EngineConfig) -> str:
    """An error in one line, without the key, which some servers repeat."""
    import openai

    said, key = f"{type(error).__name__}: {first_line_of(error)}", _api_key(config)
    if (
        isinstance(error, openai.APIStatusError)
        and error.body
        and not isinstance(error.body, str)
        and " - " not in said
    ):
        said += f" - {error.body}"  # the client omits a message in an unknown form
    return said.replace(key, "***") if key else said


def _api_key(config: EngineConfig) -> str:
    """The server's key; empty if none is set."""
    key = os.environ.get(config.api_key_env, "").strip()  # a key read from a file ends with a newline
    if not key.isascii() or not key.isprintable():
        raise UserError(f"the variable {config.api_key_env} holds characters that no key has; store only the key in it")
    return key
