"""The answer's end of the conversation with its test."""

from __future__ import annotations

import socket
import types
from typing import Any

from aliases import containers_of, contains_any
from errors import error_of_description, known_class, known_name, rows_of
from operations import OF_AN_ANSWER, TAKE_AN_ERROR
from peer import UNCHANGEABLE, CallError, Peer
from values import Coroutine, ErrorClass, Handle, TrustingReader


class AnswerPeer(Peer):
    """The answer's end of the conversation."""

    reader = TrustingReader
    trusted = False

    def __init__(self, connection: socket.socket, namespace: dict[str, Any]) -> None:
        """Serve what `namespace` defines."""
        super().__init__(connection)
        self._namespace = namespace

    def perform(self, operation: str, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
        """Serve one request of the test."""
        if operation == "lookup":
            return (arguments[0] in self._namespace, self._namespace.get(arguments[0])), None
        if operation == "call":
            return self._call(*arguments)
        if operation in TAKE_AN_ERROR:
            arguments = arguments[0], error_of_description(*arguments[1:])
        return OF_AN_ANSWER[operation](*arguments), None

    def _call(self, function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if UNCHANGEABLE.issuperset(map(type, (*arguments, *named.values()))):
            return function(*arguments, **named), None
        containers = containers_of((arguments, named))
        before = self.dumps(containers)
        try:
            result = function(*arguments, **named)
        except BaseException as error:
            raise CallError(None if self.dumps(containers) == before else containers) from error
        alike = not contains_any(result, containers) and self.dumps(containers) == before
        return result, None if alike else containers

    def error_of(self, kind: str, arguments: tuple[Any, ...], original: Any) -> BaseException:
        """An exception of a function that the test passed."""
        return known_class(kind)(*arguments)

    def original_of(self, error: BaseException) -> Any:
        """An exception of a class of the answer's own, and the class."""
        rows = rows_of(type(error), self.number_of)
        return (error, rows) if rows else None

    def name_of(self, value: Any) -> Handle | ErrorClass | Coroutine:
        """What is sent in the place of an object that cannot travel."""
        if isinstance(value, type) and issubclass(value, BaseException) and known_name(value) is None:
            return ErrorClass(rows_of(value, self.number_of))
        if type(value) is types.CoroutineType:
            return Coroutine(self.number_of(value))
        return super().name_of(value)
