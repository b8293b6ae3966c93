"""The conversation between an answer and its test: requests, each of which is served while its sender waits."""

from __future__ import annotations

import io
import socket
import struct
import types
from collections.abc import Callable
from typing import Any

import remote
import values

MAX_BYTES = 64 << 20
"""Size of one message; a larger one ends the conversation."""
_SIZE = struct.Struct(">I")
_REQUEST, _REPLY, _ERROR = 0, 1, 2


class ConversationError(BaseException):
    """The other side has ended or broken the protocol. No `except Exception` of a test may swallow it."""


class GoneError(ConversationError):
    """The other side has ended."""


class CallError(BaseException):
    """A call has failed; the exception is its cause.

    Args:
        containers: the containers in the arguments, as the call left them; None if none has changed.
    """

    def __init__(self, containers: list[Any] | None) -> None:
        self.containers = containers


class Peer:
    """The part that both ends share. Each end implements `perform`, which serves the other end's requests."""

    reader: type[values.Reader]
    trusted: bool
    """Whether functions of the standard library are sent by name."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()
        self._exported: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, remote.RemoteProxy] = {}
        self._resolve: dict[str, Callable[..., Any]] = {
            values.Handle.__name__: self._of_handle,
            values.ErrorClass.__name__: self.of_error_class,
            values.Coroutine.__name__: self.of_coroutine,
        }

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request.

        Returns:
            The result; and the containers in the arguments of a call if it changed or returned any, otherwise None.

        Raises:
            CallError: a call has failed.
        """
        raise NotImplementedError

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """The exception to raise for one of the other side; `original` is the result of `original_of` there."""
        raise NotImplementedError

    def original_of(self, error: BaseException) -> Any:
        """What to send of an exception besides its known class and its arguments."""
        return None

    def of_error_class(self, rows: Any) -> Any:
        """A proxy for an exception class of the other side."""
        raise ConversationError("no exception class is expected")

    def of_coroutine(self, number: int) -> Any:
        """A proxy for a coroutine of the other side."""
        raise ConversationError("no coroutine is expected")

    def request(self, operation: str, *arguments: Any) -> Any:
        """Request an operation from the other side.

        Raises:
            ConversationError: the other side has ended or broken the protocol.
        """
        return self._request(operation, arguments, [])

    def call(self, function: remote.RemoteProxy, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call a function of the other side; mutable arguments that it changed are changed here too."""
        plain = values.UNCHANGEABLE.issuperset(map(type, (*arguments, *named.values())))
        return self._request(
            "call", (function, arguments, named), [] if plain else values.containers_of((arguments, named))
        )

    def attribute(self, value: remote.RemoteProxy, name: str) -> Any:
        """An attribute of an object of the other side."""
        return self.request("getattr", value, name)

    def leave(self, manager: remote.RemoteProxy, error: BaseException | None) -> Any:
        """Leave a `with` block of a context manager on the other side; returns whether it swallows the error."""
        return self.request("exit", manager, *remote.description_of(error))

    def serve(self) -> None:
        """Serve requests forever.

        Raises:
            ConversationError: the other side has ended.
        """
        while True:
            self._serve(*self._receive()[1:])

    def dumps(self, value: Any) -> bytes:
        """The bytes that a value is sent as."""
        file = io.BytesIO()
        values.Writer(file, self.name_of, self.trusted).dump(value)
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
        kind = remote.nearest_known(type(error))
        try:
            return self.dumps((_ERROR, kind, (error.args, self.original_of(error), containers)))
        except Exception:  # arguments that cannot be sent, or an exception class whose methods raise
            return self.dumps((_ERROR, kind, ((type(error).__name__,), None, None)))

    def _raised(self, kind: Any, details: Any, containers: list[Any]) -> BaseException:
        try:
            arguments, original, changed = details
            error = self.error_of(kind, arguments, original)
        except (TypeError, ValueError, LookupError) as failure:
            raise ConversationError(f"no exception: {failure}") from None
        return error if changed is None else _restored(error, containers, changed)

    def number_of(self, value: Any) -> int:
        """The number by which the other side knows an object of this side."""
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._exported)
            self._exported.append(value)  # kept alive, so that no other object gets its id
        return number

    def name_of(self, value: Any) -> values.Name:
        """What to send instead of an object that cannot be sent itself."""
        if isinstance(value, remote.RemoteProxy) and object.__getattribute__(value, "_peer") is self:
            return values.Handle(object.__getattribute__(value, "_number"), of_sender=False)
        kind: type = type(value)
        return values.Handle(self.number_of(value), of_sender=True, shape=remote.shape_of(kind))

    def _of_handle(self, number: int, of_sender: bool, shape: int) -> Any:
        if type(number) is not int or type(shape) is not int or not (0 <= number and 0 <= shape):
            raise ConversationError("no such object")
        if of_sender is not True:
            return self._exported[number]
        if number not in self._remotes:
            self._remotes[number] = remote.remote_class(shape)(self, number)
        return self._remotes[number]

    def _send_bytes(self, data: bytes) -> None:
        if len(data) > MAX_BYTES:
            raise ConversationError(f"a message of {len(data)} bytes")
        try:
            self._connection.sendall(_SIZE.pack(len(data)) + data)
        except OSError as error:
            raise GoneError("the other side is gone") from error

    def _receive(self) -> tuple[int, Any, Any]:
        size = _SIZE.unpack(self._take(_SIZE.size))[0]
        if size > MAX_BYTES:
            raise ConversationError(f"a message of {size} bytes")
        data = self._take(size)
        try:
            kind, first, second = self.reader(data, self._resolve).read()
        except Exception as error:  # anything that a hostile message makes the reader raise
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
        return values.restore(value, containers, changed)
    except ValueError as error:
        raise ConversationError(str(error)) from None


def describe(error: BaseException) -> str:
    """An exception in one line, as Python prints it."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


# The answer's end; the test's end is in `tester.py`


class AnswerPeer(Peer):
    """The answer's end of the conversation; `namespace` holds the answer's globals."""

    reader = values.TrustingReader
    trusted = False

    def __init__(self, connection: socket.socket, namespace: dict[str, Any]) -> None:
        super().__init__(connection)
        self._namespace = namespace

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request of the test."""
        if operation == "lookup":
            return (arguments[0] in self._namespace, self._namespace.get(arguments[0])), None
        if operation == "call":
            return self._call(*arguments)
        if operation in remote.TAKE_AN_ERROR:
            arguments = arguments[0], remote.error_of_description(*arguments[1:])
        return remote.ANSWER_OBJECT_OPS[operation](*arguments), None

    def _call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if values.UNCHANGEABLE.issuperset(map(type, (*arguments, *named.values()))):
            return function(*arguments, **named), None
        containers = values.containers_of((arguments, named))
        before = self.dumps(containers)
        try:
            result = function(*arguments, **named)
        except BaseException as error:
            raise CallError(None if self.dumps(containers) == before else containers) from error
        alike = not values.contains_any(result, containers) and self.dumps(containers) == before
        return result, None if alike else containers

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """An exception of a function that the test passed."""
        return remote.known_class(kind)(*arguments)

    def original_of(self, error: BaseException) -> Any:
        """The exception and its class, if the answer defines the class."""
        rows = remote.rows_of(type(error), self.number_of)
        return (error, rows) if rows else None

    def name_of(self, value: Any) -> values.Name:
        """What to send instead of an object that cannot be sent itself."""
        if isinstance(value, type) and issubclass(value, BaseException) and remote.known_name(value) is None:
            return values.ErrorClass(remote.rows_of(value, self.number_of))
        if type(value) is types.CoroutineType:
            return values.Coroutine(self.number_of(value))
        return super().name_of(value)
