"""The client of a running server, tested against a server with every kind of failure."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eval_pipeline.__main__ import main
from eval_pipeline.config import EngineConfig, SamplingConfig
from eval_pipeline.engines import (
    EngineDied,
    GeneratedAnswer,
    GenerateRequest,
    openai_engine,
    request_seed,
)
from eval_pipeline.engines.openai_engine import CONTROL_PROMPT, find_served_model
from eval_pipeline.worker import open_engine
from tests.helpers.processes import wait_until
from verl_ext.errors import UserError

KEY = "sk-secret-of-the-test"
REQUEST = GenerateRequest("p", "Say it.")
BAD = GenerateRequest("b", "bad")
GREEDY = SamplingConfig()
Reply = tuple[int, Any]


class Server(ThreadingHTTPServer):
    """A server for a part of the protocol: `reply` returns status and body of each chat response.

    If it returns None, the connection is dropped.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: list[Any] = ["tiny"]
        self.cards: Callable[[list[Any]], list[Any]] = lambda names: [{"id": name, "object": "model"} for name in names]
        self.reply: Callable[[dict[str, Any]], Reply | None] = lambda body: completion("said")
        self.asked: list[dict[str, Any]] = []
        self.keys: set[str] = set()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback: a client that stops closes its connections."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        listed = {"object": "list", "data": self.server.cards(self.server.models)}
        self._send(*((200, listed) if self.path == "/v1/models" else (404, refusal("no such page"))))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        self.server.keys.add(self.headers["Authorization"])
        reply = self.server.reply(body)
        if reply is not None:
            self._send(*reply)

    def _send(self, status: int, body: dict[str, Any] | bytes) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Retry-After", "0.01")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def completion(content: Any, finish_reason: str = "stop") -> Reply:
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": content}}
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    return 200, {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "tiny",
        "choices": [choice],
        "usage": usage,
    }


def unless_bad(reply: Reply | None) -> Callable[[dict[str, Any]], Reply | None]:
    """A reply function that answers every prompt except `bad`."""
    return lambda body: reply if prompt_of(body) == BAD.prompt else completion("said")


def prompt_of(body: dict[str, Any]) -> str:
    return body["messages"][0]["content"]


def refusal(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "error"}}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("TEST_API_KEY", KEY)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: Server, requests: list[GenerateRequest], sampling: SamplingConfig = GREEDY, **settings: Any
) -> list[GeneratedAnswer]:
    known = EngineConfig(kind="openai", base_url=server.url, api_key_env="TEST_API_KEY", **settings)
    with open_engine(known, None) as engine:
        assert KEY not in json.dumps(engine.protocol)
        return [answer for _, answer in engine.answers(requests, sampling)]


def test_client_sends_and_reads_expected_fields(server: Server) -> None:
    server.reply = lambda body: completion("cut", "length")
    sampling = SamplingConfig(temperature=0.5, top_p=0.9, max_tokens=33)
    assert ask(server, [REQUEST], sampling) == [GeneratedAnswer("cut", 7, truncated=True)]
    (asked,) = server.asked
    assert asked == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Say it."}],
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 33,
        "seed": request_seed(REQUEST, sampling),
    }
    assert server.keys == {f"Bearer {KEY}"}


def test_client_sends_chat_template_arguments(server: Server) -> None:
    ask(server, [REQUEST], chat_template_kwargs={"enable_thinking": False})
    assert server.asked[0]["chat_template_kwargs"] == {"enable_thinking": False}


def test_client_works_without_api_key(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEST_API_KEY")
    assert ask(server, [REQUEST]) == [GeneratedAnswer("said", 7, truncated=False)]
    assert server.keys == {"Bearer EMPTY"}
    assert "seed" not in server.asked[0]


def test_busy_or_broken_server_is_retried(server: Server) -> None:
    troubles = iter([(429, refusal("busy")), (503, refusal("broken")), (500, refusal("broken"))])
    server.reply = lambda body: next(troubles, completion("said"))
    assert ask(server, [REQUEST]) == [GeneratedAnswer("said", 7, truncated=False)]
    assert len(server.asked) == 4


def test_prompt_that_breaks_server_fails_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "NUM_RETRIES", 1)
    server.reply = unless_bad((500, refusal(f"cannot with {KEY}")))
    answers = ask(server, [GenerateRequest("a", "good"), BAD, GenerateRequest("c", "good")], concurrency=2)
    (failed,) = [answer for answer in answers if answer.error]
    assert sum(answer == GeneratedAnswer("said", 7, truncated=False) for answer in answers) == 2
    assert "InternalServerError" in failed.error and KEY not in failed.error
    prompts = [prompt_of(body) for body in server.asked]
    # retried between two answers of the same server
    assert [prompt for prompt in prompts if prompt != "good"] == [
        "bad",
        "bad",
        CONTROL_PROMPT.prompt,
        "bad",
        CONTROL_PROMPT.prompt,
    ]


def test_server_that_recovered_is_retried(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "NUM_RETRIES", 1)
    troubles = iter([(500, refusal("broken")), (502, refusal("broken"))])
    server.reply = lambda body: next(troubles, completion("said"))
    assert ask(server, [REQUEST]) == [GeneratedAnswer("said", 7, truncated=False)]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503, 400, None])
def test_unresponsive_server_raises_engine_died(
    status: int | None, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_engine, "NUM_RETRIES", 1)
    server.reply = lambda body: None if status is None else (status, refusal(f"not with {KEY}"))
    fault = "refuses requests" if status in (400, 401, 403, 404) else "does not answer"
    with pytest.raises(EngineDied, match=f"{server.url} {fault}") as error:
        ask(server, [REQUEST, BAD])
    assert KEY not in str(error.value)


@pytest.mark.parametrize("status", [401, 403, 404, 429])
def test_server_side_failure_raises_engine_died(status: int, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "NUM_RETRIES", 1)
    server.reply = unless_bad((status, refusal("no")))
    known = EngineConfig(kind="openai", base_url=server.url, concurrency=1)
    with open_engine(known, None) as engine:
        answers = engine.answers([REQUEST, BAD, REQUEST], GREEDY)
        assert next(answers) == (REQUEST, GeneratedAnswer("said", 7, truncated=False))  # what came is kept
        with pytest.raises(EngineDied):
            next(answers)


@pytest.mark.parametrize("status", [400, 413, 422])
def test_rejected_prompt_fails_alone(status: int, server: Server) -> None:
    server.reply = unless_bad((status, refusal("not this one")))
    first, second = ask(server, [BAD, BAD], concurrency=1)
    assert first == second and "not this one" in first.error
    assert [prompt_of(body) for body in server.asked] == ["bad", CONTROL_PROMPT.prompt, "bad"]  # others are answered


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "FIRST_PAUSE_S", 0)
    monkeypatch.setattr(openai_engine, "LAST_PAUSE_S", 0)


MALFORMED: list[Any] = [
    completion("")[1] | {"choices": []},
    completion("")[1] | {"choices": None},
    completion("")[1] | {"choices": [{}]},
    completion("")[1] | {"choices": [{"finish_reason": "stop", "message": None}]},
    completion({"text": "no list"})[1],
    [],
    b'{"id": "1", "choices": [{"ind',
]


@pytest.mark.parametrize("body", MALFORMED)
def test_malformed_reply_is_retried(body: Any, server: Server, without_pauses: None) -> None:
    replies = iter([(200, body)] * openai_engine.NUM_RETRIES)
    server.reply = lambda _: next(replies, completion("said"))
    assert ask(server, [REQUEST]) == [GeneratedAnswer("said", 7, truncated=False)]


def test_control_prompt_survives_malformed_reply(server: Server, without_pauses: None) -> None:
    controls = iter([(200, []), (200, [])])
    bad = unless_bad((500, refusal("no")))
    server.reply = lambda body: next(controls, bad(body)) if prompt_of(body) == CONTROL_PROMPT.prompt else bad(body)
    [answer] = ask(server, [BAD])
    assert "InternalServerError" in (answer.error or "")


@pytest.mark.parametrize("body", MALFORMED)
def test_response_without_answer_is_an_error(body: Any, server: Server, without_pauses: None) -> None:
    server.reply = unless_bad((200, body))
    (answer,) = ask(server, [BAD])
    assert answer.error and "Error: " in answer.error
    server.reply = lambda _: (200, body)
    with pytest.raises(EngineDied, match="sends malformed replies"):
        ask(server, [BAD])


def test_parts_of_answer_are_joined(server: Server) -> None:
    thinking = {"type": "thinking", "thinking": [{"type": "text", "text": "2 + 2"}]}
    parts = [thinking, {"type": "text", "text": "It is"}, {"type": "text", "text": " 4."}]
    server.reply = lambda body: completion(parts)
    assert ask(server, [REQUEST]) == [GeneratedAnswer("It is 4.", 7, truncated=False)]


def broken_off(finish_reason: str, **fields: Any) -> dict[str, Any]:
    """The reply of a server that failed during generation."""
    reply = completion("cut of", finish_reason)[1]
    return reply | {"choices": [reply["choices"][0] | fields]}


ERRORS_IN_REPLY: list[Any] = [
    ({"error": {"message": "Rate limit exceeded", "code": 429}}, "Rate limit exceeded"),
    ({"error": "overloaded"}, "overloaded"),
    (broken_off("error", error={"code": 502, "message": "upstream"}), "upstream"),
    (broken_off("error"), "finish_reason 'error'"),
    (broken_off("abort"), "finish_reason 'abort'"),
]


@pytest.mark.parametrize(("body", "message"), ERRORS_IN_REPLY)
def test_error_in_reply_is_retried_and_shown(body: Any, message: str, server: Server, without_pauses: None) -> None:
    replies = iter([(200, body)] * openai_engine.NUM_RETRIES)
    server.reply = lambda _: next(replies, completion("said"))
    assert ask(server, [REQUEST]) == [GeneratedAnswer("said", 7, truncated=False)]
    server.reply = unless_bad((200, body))
    (answer,) = ask(server, [BAD])
    assert message in (answer.error or "")
    server.reply = lambda _: (200, body)
    with pytest.raises(EngineDied, match=rf"does not answer \(.*{message}\)"):
        ask(server, [BAD])


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}, []])
def test_missing_token_count_is_zero_with_one_warning(
    usage: Any, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.reply = lambda body: (200, completion("said")[1] | {"usage": usage})
    assert ask(server, [REQUEST, REQUEST]) == [GeneratedAnswer("said", 0, truncated=False)] * 2
    assert capsys.readouterr().err.count("does not report the number of tokens") == 1


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_answer_inside_reasoning_is_kept_with_one_warning(
    name: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = completion(None)[1]
    message = {"role": "assistant", "content": None, name: "2 + 2\n#### 4"}
    bad = (200, reply | {"choices": [reply["choices"][0] | {"message": message}]})
    server.reply = unless_bad(bad)
    known = EngineConfig(kind="openai", base_url=server.url)
    with open_engine(known, None) as engine:
        first = [answer.text for _, answer in engine.answers([BAD, REQUEST, BAD], GREEDY)]
        assert sorted(first) == ["<think>2 + 2\n#### 4</think>"] * 2 + ["said"]
        assert "2 of 3 answers without text after the reasoning" in capsys.readouterr().err
        list(engine.answers([BAD], GREEDY))
    assert not capsys.readouterr().err


def test_filtered_answer_is_an_error(server: Server) -> None:
    server.reply = unless_bad(completion("", "content_filter"))
    first, second = ask(server, [BAD, REQUEST], concurrency=1)
    assert "content filter" in (first.error or "") and second.text == "said"


def test_prompt_on_which_connection_closes_fails_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_engine, "NUM_RETRIES", 1)
    server.reply = unless_bad(None)
    first, second = ask(server, [BAD, REQUEST], concurrency=1)
    assert "APIConnectionError" in (first.error or "") and second.text == "said"


def test_prompt_on_which_server_hangs_fails_alone(server: Server) -> None:
    release = threading.Event()
    server.reply = lambda body: hang(release) if prompt_of(body) == BAD.prompt else completion("said")
    first, second = ask(server, [BAD, REQUEST], concurrency=1, timeout_s=0.5)
    release.set()
    assert "engine.timeout_s=0.5 seconds" in (first.error or "") and second.text == "said"


def test_too_large_max_tokens_falls_back_to_remaining_length(server: Server) -> None:
    too_long = (400, refusal("max_tokens is too large: 2048. This model's maximum context length is 96 tokens"))
    server.reply = lambda body: too_long if "max_tokens" in body else completion("short")
    assert ask(server, [REQUEST]) == [GeneratedAnswer("short", 7, truncated=False)]


def openai_refusal(kind: str, name: str, message: str) -> Reply:
    error = {"message": f"Unsupported {kind}: {message}", "param": name, "code": f"unsupported_{kind}"}
    return 400, {"error": error | {"type": "invalid_request_error"}}


def reasoning_model(body: dict[str, Any]) -> Reply:
    """A reply of OpenAI's o-series and GPT-5 models, which accept fewer parameters."""
    if "max_tokens" in body:
        message = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
        return openai_refusal("parameter", "max_tokens", message)
    if "top_p" in body:
        return openai_refusal("parameter", "top_p", "'top_p' is not supported with this model.")
    if body.get("temperature", 1) != 1:
        message = "'temperature' does not support 0 with this model. Only the default (1) value is supported."
        return openai_refusal("value", "temperature", message)
    return completion("said")


def test_parameters_adapt_to_reasoning_models(server: Server) -> None:
    server.reply = reasoning_model
    sampling = SamplingConfig(temperature=1, max_tokens=33)
    assert ask(server, [REQUEST] * 3, sampling, concurrency=1) == [GeneratedAnswer("said", 7, truncated=False)] * 3
    *refused, first, second, third = server.asked
    assert len(refused) == 2 and first == second == third  # both refusals are remembered
    assert first["max_completion_tokens"] == 33 and "top_p" not in first and first["temperature"] == 1


def test_token_limit_with_new_name_falls_back_to_remaining_length(server: Server) -> None:
    too_long = (400, refusal("This model's maximum context length is 96 tokens"))
    server.reply = lambda body: too_long if "max_completion_tokens" in body else reasoning_model(body)
    (answer,) = ask(server, [REQUEST], SamplingConfig(temperature=1))
    assert answer.text == "said"


SEED_REFUSAL = {"detail": [{"type": "extra_forbidden", "loc": ["body", "seed"], "msg": "Extra inputs", "input": 1}]}


@pytest.mark.parametrize(
    ("reply", "sampling", "advice"),
    [
        (reasoning_model, GREEDY, r"'temperature' does not support 0 .*; set sampling\.temperature=1"),
        (reasoning_model, SamplingConfig(temperature=1, top_p=0.5), r"'top_p' is not .*; set sampling\.top_p=1"),
        (lambda body: (422, SEED_REFUSAL), SamplingConfig(temperature=1), r"'seed'.*; set sampling\.temperature=0"),
    ],
)
def test_unsupported_sampling_is_refused_with_advice(
    reply: Callable[[dict[str, Any]], Reply], sampling: SamplingConfig, advice: str, server: Server
) -> None:
    server.reply = reply
    with pytest.raises(EngineDied, match=f"{server.url} refuses requests .*{advice}"):
        ask(server, [REQUEST], sampling)


def test_concurrency_limits_requests_in_flight(server: Server) -> None:
    lock, under_way, peak = threading.Lock(), 0, 0
    together = threading.Barrier(3, timeout=30)  # passes only while three are under way

    def reply(body: dict[str, Any]) -> Reply:
        nonlocal under_way, peak
        with lock:
            under_way += 1
            peak = max(peak, under_way)
        together.wait()
        with lock:
            under_way -= 1
        return completion("said")

    server.reply = reply
    assert len(ask(server, [GenerateRequest(str(i), "x") for i in range(12)], concurrency=3)) == 12
    assert peak == 3


def test_closing_does_not_wait_for_pending_requests(server: Server) -> None:
    release = threading.Event()
    server.reply = lambda body: completion("said") if body["messages"][0]["content"] == "first" else hang(release)
    requests = [GenerateRequest("0", "first"), *(GenerateRequest(str(i), "never") for i in range(1, 9))]
    num_threads = threading.active_count()
    # a thread that reads from the socket while the client closes it may only notice at its time limit
    settings = EngineConfig(kind="openai", base_url=server.url, concurrency=2, timeout_s=20)
    with open_engine(settings, None) as engine:
        answers = engine.answers(requests, SamplingConfig())
        assert next(answers)[0].problem_id == "0"
        answers.close()
    release.set()
    wait_until(lambda: threading.active_count() <= num_threads)  # the threads that waited for an answer have ended
    assert len(server.asked) <= 3


def hang(release: threading.Event) -> Reply:
    release.wait(60)
    return completion("late")


def test_timeout_includes_retries(server: Server) -> None:
    release = threading.Event()
    server.reply = lambda body: hang(release)
    with pytest.raises(EngineDied, match="engine.timeout_s=0.5 seconds, including retries"):
        ask(server, [REQUEST], timeout_s=0.5)
    release.set()
    assert [prompt_of(body) for body in server.asked] == [REQUEST.prompt, CONTROL_PROMPT.prompt]
    server.asked.clear()
    server.reply = lambda body: None
    with pytest.raises(EngineDied, match="engine.timeout_s=1.1"):
        ask(server, [REQUEST], timeout_s=1.1)
    assert 2 <= len(server.asked) <= 3  # pauses of 0.5 s, 1 s ..., each up to a quarter shorter


@pytest.mark.parametrize("key", [f"{KEY}\n", f" {KEY} "])
def test_white_space_around_api_key_is_stripped(key: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", key)
    assert ask(server, [REQUEST]) == [GeneratedAnswer("said", 7, truncated=False)]
    assert server.keys == {f"Bearer {KEY}"}


@pytest.mark.parametrize("key", ["sk-two\nlines", "sk-\u00e9"])
def test_invalid_api_key_is_rejected(key: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_API_KEY", key)
    with pytest.raises(UserError, match="the variable TEST_API_KEY holds") as error:
        ask(server, [REQUEST])
    assert "sk-" not in str(error.value)


def test_missing_server_is_reported() -> None:
    settings = EngineConfig(kind="openai", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:9/v1"), open_engine(settings, None):
        pass


def test_invalid_model_list_is_rejected(server: Server) -> None:
    server.cards = lambda names: [["no", "name"]]
    with pytest.raises(UserError, match="does not list its models"):
        ask(server, [REQUEST])


def test_url_without_api_path_is_rejected(server: Server) -> None:
    settings = EngineConfig(kind="openai", base_url=server.url.removesuffix("/v1"))
    with pytest.raises(UserError, match="does not list its models .* ends in /v1"), open_engine(settings, None):
        pass


@pytest.mark.parametrize(
    ("models", "wanted", "message"),
    [
        (["a", "b"], None, "several models; set engine.model to .*: a, b"),
        (["a", "b"], "c", "does not serve c; set engine.model to .*: a, b"),
        ([], None, "serves no model"),
    ],
)
def test_ambiguous_model_is_rejected(server: Server, models: list[str], wanted: str | None, message: str) -> None:
    server.models = models
    with pytest.raises(UserError, match=message):
        ask(server, [REQUEST], model=wanted)
    server.models = ["a", "b"]
    ask(server, [REQUEST], model="b")
    assert server.asked[-1]["model"] == "b"


def test_checkpoint_directory_is_matched_to_served_model(server: Server, tmp_path: Path) -> None:
    export, other = tmp_path / "huggingface", tmp_path / "other"
    export.mkdir()
    (tmp_path / "link").symlink_to(export)
    settings = EngineConfig(kind="openai", base_url=server.url)
    for loaded in (str(export), str(tmp_path / "link")):
        server.models = [{"id": "a", "root": loaded, "max_model_len": 96}, {"id": "b", "root": "hub/b"}]
        server.cards = list
        card = find_served_model(settings, export)
        assert (card.id, card.root, card.max_model_len) == ("a", loaded, 96)
        with pytest.raises(UserError, match="serves a .loaded from .*, b .*not .*/other; "):
            find_served_model(settings, other)
    server.models = [{"id": str(export)}]
    assert find_served_model(settings, export).id == str(export)
    server.models = [{"id": "a", "root": "huggingface"}]  # wherever the server was started
    with pytest.raises(UserError, match="absolute path"):
        find_served_model(settings, export)


@pytest.mark.parametrize("url", [["engine.base_url=http://127.0.0.1:9/v1"], []])
@pytest.mark.parametrize("command", ["watch", "report"])
def test_watch_and_report_reject_openai_engine(
    command: str, url: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    further = ["--baseline", str(tmp_path)] if command == "report" else []
    with pytest.raises(SystemExit) as left:
        main([command, str(tmp_path), *further, "engine.kind=openai", *url])
    assert left.value.code == 2
    assert f"`{command}` loads every model itself" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_slow_consumer_does_not_time_out_requests(server: Server) -> None:
    requests = [GenerateRequest(str(number), "x") for number in range(6)]
    settings = EngineConfig(kind="openai", base_url=server.url, concurrency=2, timeout_s=0.5)
    with open_engine(settings, None) as engine:
        answers = engine.answers(requests, GREEDY)
        first = next(answers)[0]
        wait_until(lambda: len(server.asked) == 6)  # the others do not wait for the caller
        threading.Event().wait(0.6)  # longer than a request may take
        assert {each.problem_id for each, _ in answers} == {str(n) for n in range(6)} - {first.problem_id}
