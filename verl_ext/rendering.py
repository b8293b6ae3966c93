"""Runs chat templates safely: a template is a program in a model's files, and may raise anything or never terminate."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

from jinja2 import TemplateError

from verl_ext.errors import UserError, one_line

RENDER_S = 5.0
"""Maximum CPU time of a rendering; a chat of 100,000 tokens takes a few hundredths of a second."""


class EndlessTemplate(UserError):
    """A rendering exceeded `RENDER_S`."""


class rendering:  # noqa: N801 - reads like a function, as contextlib's do; a generator would take longer than the timer
    """Limits the CPU time and the exceptions of a rendering; costs about 2 µs.

    The limit applies to the main thread, the only thread that handles signals and renders. The timer counts the time of
    all threads, including native threads of libraries, so it is restarted until this thread alone has used its time.

    Raises:
        EndlessTemplate: the rendering took longer than `RENDER_S`.
        TemplateError: the template refuses the chat, or fails on it with any exception.
    """

    _has_handler = False
    _started = 0.0

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            if not rendering._has_handler:
                signal.signal(signal.SIGVTALRM, _raise_if_time_is_up)
                rendering._has_handler = True
            rendering._started = time.thread_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_S)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if isinstance(error, _TimeUp):
            raise EndlessTemplate(
                f"the chat template does not terminate: rendering took more than {RENDER_S:g} s; correct the template"
            ) from None
        if isinstance(error, Exception) and not isinstance(error, (TemplateError, UserError)):
            raise TemplateError(one_line(error)) from error


class _TimeUp(BaseException):
    """Not an `Exception`, because Jinja's optimizer drops exceptions of constant expressions."""


def _raise_if_time_is_up(number: int, frame: FrameType | None) -> None:
    left = RENDER_S - (time.thread_time() - rendering._started)
    if left <= 0:
        raise _TimeUp
    signal.setitimer(signal.ITIMER_VIRTUAL, max(left, 0.01))  # 0 would disable the timer
