"""One end of the conversation between an answer and its test: requests, each served while its sender waits."""

from __future__ import annotations

import io
import socket
import struct
from collections.abc import Callable
from typing import Any

from aliases import containers_of, restore
from errors import description_of, nearest_known
from remote import Remote, remote_class, shape_of
from values import Coroutine, ErrorClass, Handle, Reader, Writer

MOST_BYTES = 64 << 20
"""Size of one message; a larger one ends the conversation."""
_SIZE = struct.Struct(">I")
_REQUEST, _REPLY, _ERROR = 0, 1, 2
UNCHANGEABLE = frozenset((bool, int, float, complex, str, bytes, type(None)))
"""Types of arguments that a call cannot change."""


class ConversationError(BaseException):
    """The other side has ended, or it broke the rules. No `except Exception` of a test may swallow it."""


class GoneError(ConversationError):
    """The other side has ended."""


class CallError(BaseException):
    """A call has failed; carries the exception as its cause, and the containers in the arguments as they are now."""

    def __init__(self, containers: list[Any] | None) -> None:
        """`containers` is None where none has changed."""
        self.containers = containers


class Peer:
    """What both ends share; each end says in `perform` what it does for the other."""

    reader: type[Reader]
    trusted: bool
    """Whether this end's functions of the standard library may go by their names."""

    def __init__(self, connection: socket.socket) -> None:
        """Talk over a connected stream socket."""
        self._connection = connection
        self._received = bytearray()
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}
        self._resolve: dict[str, Callable[..., Any]] = {
            Handle.__name__: self._of_handle,
            ErrorClass.__name__: self.of_error_class,
            Coroutine.__name__: self.of_coroutine,
        }

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request.

        Returns:
            Its result; and the containers in the arguments of a call where it changed or returned any, else None.

        Raises:
            CallError: a call has failed.
        """
        raise NotImplementedError

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """What to raise here for an exception over there; `original` is what `original_of` sent of it."""
        raise NotImplementedError

    def original_of(self, error: BaseException) -> Any:
        """What to send of an exception beside its known class and its arguments."""
        return None

    def of_error_class(self, rows: Any) -> Any:
        """What stands for an exception class that lives there."""
        raise ConversationError("no exception class is expected")

    def of_coroutine(self, number: int) -> Any:
        """What stands for a coroutine that lives there."""
        raise ConversationError("no coroutine is expected")

    def request(self, operation: str, *arguments: Any) -> Any:
        """Have the other side do something.

        Raises:
            ConversationError: it is gone, or broke the rules.
        """
        return self._request(operation, arguments, [])

    def call(self, function: Remote, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function that lives there; mutable arguments that it changed are changed here too."""
        plain = UNCHANGEABLE.issuperset(map(type, (*arguments, *named.values())))
        return self._request("call", (function, arguments, named), [] if plain else containers_of((arguments, named)))

    def attribute(self, value: Remote, name: str) -> Any:
        """An attribute of an object that lives there."""
        return self.request("getattr", value, name)

    def leave(self, manager: Remote, error: BaseException | None) -> Any:
        """Have a context manager that lives there handle the end of a `with`; returns whether it swallows the error."""
        return self.request("exit", manager, *description_of(error))

    def serve(self) -> None:
        """Serve requests for ever.

        Raises:
            ConversationError: the other side has ended.
        """
        while True:
            self._serve(*self._receive()[1:])

    def dumps(self, value: Any) -> bytes:
        """A value as it would be sent."""
        file = io.BytesIO()
        Writer(file, self.name_of, self.trusted).dump(value)
        return file.getvalue()

    def _request(self, operation: str, arguments: tuple[Any, ...], containers: list[Any]) -> Any:
        self._send_bytes(self.dumps((_REQUEST, operation, arguments)))
        while True:
            kind, first, second = self._receive()
            if kind == _REPLY:
                return first if second is None else _restored(first, containers, second)
            if kind == _ERROR:
                raise self._raised(first, second, containers)
            self._serve(first, second)

    def _serve(self, operation: str, arguments: tuple[Any, ...]) -> None:
        try:
            message = self.dumps((_REPLY, *self.perform(operation, arguments)))
        except ConversationError:
            raise
        except CallError as error:
            message = self._error_message(error.__cause__ or error, error.containers)
        except BaseException as error:
            message = self._error_message(error, None)
        self._send_bytes(message)

    def _error_message(self, error: BaseException, containers: list[Any] | None) -> bytes:
        kind = nearest_known(type(error))
        try:
            return self.dumps((_ERROR, kind, (error.args, self.original_of(error), containers)))
        except Exception:  # arguments that cannot travel, or an exception class whose methods raise
            return self.dumps((_ERROR, kind, ((type(error).__name__,), None, None)))

    def _raised(self, kind: Any, details: Any, containers: list[Any]) -> BaseException:
        try:
            arguments, original, changed = details
            error = self.error_of(kind, arguments, original)
        except (TypeError, ValueError, LookupError) as failure:
            raise ConversationError(f"no exception: {failure}") from None
        return error if changed is None else _restored(error, containers, changed)

    def number_of(self, value: Any) -> int:
        """The number by which the other side knows an object of this one."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._exported)
            self._exported.append(value)  # kept alive, so that its id stays its own
        return number

    def name_of(self, value: Any) -> Handle | ErrorClass | Coroutine:
        """What is sent in the place of an object that cannot travel."""
        if isinstance(value, Remote) and object.__getattribute__(value, "_peer") is self:
            return Handle(object.__getattribute__(value, "_number"), of_sender=False)
        kind: type = type(value)
        return Handle(self.number_of(value), of_sender=True, shape=shape_of(kind))

    def _of_handle(self, number: int, of_sender: bool, shape: int) -> Any:
        if type(number) is not int or type(shape) is not int or not (0 <= number and 0 <= shape):
            raise ConversationError("no such object")
        if of_sender is not True:
            return self._exported[number]
        if number not in self._remotes:
            self._remotes[number] = remote_class(shape)(self, number)
        return self._remotes[number]

    def _send_bytes(self, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            raise ConversationError(f"a message of {len(data)} bytes")
        try:
            self._connection.sendall(_SIZE.pack(len(data)) + data)
        except OSError as error:
            raise GoneError("the other side is gone") from error

    def _receive(self) -> tuple[int, Any, Any]:
        size = _SIZE.unpack(self._take(_SIZE.size))[0]
        if size > MOST_BYTES:
            raise ConversationError(f"a message of {size} bytes")
        data = self._take(size)
        try:
            kind, first, second = self.reader(data, self._resolve).read()
        except Exception as error:  # whatever a hostile message makes the reader raise
            raise ConversationError(f"no message: {type(error).__name__}") from error
        if kind not in (_REQUEST, _REPLY, _ERROR) or (kind == _REQUEST and type(second) is not tuple):
            raise ConversationError("no message")
        return kind, first, second

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            try:
                chunk = self._connection.recv(1 << 16)
            except OSError as error:
                raise GoneError("the other side is gone") from error
            if not chunk:
                raise GoneError("the other side is gone")
            self._received += chunk
        data = bytes(self._received[:size])
        del self._received[:size]
        return data


def _restored(value: Any, containers: list[Any], changed: Any) -> Any:
    try:
        return restore(value, containers, changed)
    except ValueError as error:
        raise ConversationError(str(error)) from None


def describe(error: BaseException) -> str:
    """An exception in one line, as Python prints it."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
