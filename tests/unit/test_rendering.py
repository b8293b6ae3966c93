"""A chat template is a program: one that fails or never ends is rejected, whatever it raises."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
from jinja2 import TemplateError

from tests.helpers.models import make_tokenizer
from verl_ext import rendering as module
from verl_ext.data.chat_template import ChatTemplate
from verl_ext.data.training_templates import parse_chat_template
from verl_ext.errors import UserError
from verl_ext.rendering import EndlessTemplate, rendering

CHAT = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
ENDLESS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "marked loops": "{% generation %}{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    "{% endgeneration %}",
    "constant": "{{ 9 ** (9 ** 9) }}",
    "number": "{% set n = messages | length * 9 ** 8 %}{{ 9 ** n }}",
}


def template_of(text: str) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer, {})


@pytest.mark.parametrize("name", ENDLESS)
def test_rejects_endless_template_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDER_S", 0.2)
    started = time.process_time()
    first, *others = template_of(ENDLESS[name]).encode([CHAT] * 50, [{}] * 50)
    assert time.process_time() - started < 10  # and not 50 times as long as one takes
    assert isinstance(first, UserError) and "does not terminate" in str(first)
    assert all(other is first for other in others)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("{% for i in range(10 ** 10) %}x{% endfor %}", "OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].nothing.more }}", "no attribute 'nothing'"),
        ("{{ raise_exception('no system turn') }}", "no system turn"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "SyntaxError"),
    ],
)
def test_rejects_row_whatever_template_raises(text: str, names: str) -> None:
    [refused] = template_of(text).encode([CHAT], [{}])
    assert isinstance(refused, UserError) and names in str(refused)
    with pytest.raises(TemplateError, match=names):
        template_of(text).render(CHAT)


def test_rejects_template_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDER_S", 0.2)
    with pytest.raises(UserError, match="data.chat_template cannot be compiled"):
        parse_chat_template(ENDLESS["constant"])
    with pytest.raises(UserError, match="data.chat_template is not a Jinja template .*RecursionError"):
        parse_chat_template("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")


def busy(seconds: float) -> None:
    """Use CPU time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(10_000))  # a clock that is read all the time takes the system's time, which does not count


def test_time_of_native_threads_is_not_charged_to_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDER_S", 0.3)

    def work() -> None:
        end = time.thread_time() + 0.6
        while time.thread_time() < end:  # without the interpreter's lock, as threads of tokenizers and BLAS do
            hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)

    def render_while_thread_works(seconds: float) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        try:
            with rendering():
                busy(seconds)
                thread.join()
        finally:
            thread.join()

    render_while_thread_works(0.05)
    with pytest.raises(EndlessTemplate):
        render_while_thread_works(5)


def test_time_limit_applies_per_rendering_in_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RENDER_S", 0.3)
    for _ in range(3):
        with rendering():
            busy(0.15)
    busy(0.4)  # time outside a rendering is not counted
    with pytest.raises(EndlessTemplate), rendering():
        busy(5)

    def render_in_thread() -> None:
        with rendering():
            pass

    thread = threading.Thread(target=render_in_thread)
    thread.start()
    thread.join()
