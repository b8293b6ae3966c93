"""What the judge server and the processes in its sandboxes share: messages, the program file, and preloaded modules.

A message is a JSON object with a blob of bytes and, on sockets, open files. It is JSON so that a reader need not trust
the writer. The server and its client import this module too, so it imports no sibling.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

_HEAD = struct.Struct(">II")
MAX_BYTES = 1 << 30
"""Larger parts are treated as garbage."""


class FrameError(Exception):
    """The other side ended in the middle of a message, or wrote something that is not a message."""


def pack(message: dict[str, Any], blob: bytes = b"") -> bytes:
    """One message as bytes."""
    text = json.dumps(message).encode()
    return _HEAD.pack(len(text), len(blob)) + text + blob


def send(connection: socket.socket, message: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
    """Send one message.

    Args:
        connection: a connected unix stream socket.
        message: anything that JSON can express.
        blob: bytes to send with it.
        fds: open files; the other side gets copies.

    Raises:
        OSError: the other side is gone.
    """
    data = memoryview(pack(message, blob))
    if fds:
        data = data[socket.send_fds(connection, [data], list(fds)) :]
    connection.sendall(data)


def write(fd: int, message: dict[str, Any], blob: bytes = b"") -> None:
    """Write one message to a pipe.

    Raises:
        OSError: the reader has closed it.
    """
    data = memoryview(pack(message, blob))
    while data:
        data = data[os.write(fd, data) :]


def send_parts(connection: socket.socket, message: dict[str, Any], parts: list[memoryview]) -> None:
    """Send one message whose blob is in several places, without copying it.

    Raises:
        OSError: the other side is gone.
    """
    text = json.dumps(message).encode()
    connection.sendall(_HEAD.pack(len(text), sum(map(len, parts))) + text)
    for part in filter(None, parts):
        connection.sendall(part)


def receive(connection: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any], bytes, list[int]] | None:
    """Receive one message with its blob and open files; None once the other side has closed the connection.

    Raises:
        FrameError: the received data is not a whole message.
    """
    fds: list[int] = []
    head = b""
    try:
        if max_fds:
            head, fds, _, _ = socket.recv_fds(connection, _HEAD.size, max_fds)
            if not head:
                return None
        parts = _parts(lambda size: connection.recv(size), head)
    except ConnectionError:
        return None
    return None if parts is None else (*parts, fds)


def read(fd: int) -> tuple[dict[str, Any], bytes] | None:
    """Read one message from a pipe; None at its end.

    Raises:
        FrameError: the data is not a whole message.
    """
    return _parts(lambda size: os.read(fd, size), b"")


def _parts(take: Callable[[int], bytes], head: bytes) -> tuple[dict[str, Any], bytes] | None:
    head += _exactly(take, _HEAD.size - len(head), may_end=not head)
    if not head:
        return None
    text_size, blob_size = _HEAD.unpack(head)
    if max(text_size, blob_size) > MAX_BYTES:
        raise FrameError(f"a message of {max(text_size, blob_size)} bytes")
    try:
        message = json.loads(_exactly(take, text_size))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise FrameError("not a message: no JSON object")
    return message, _exactly(take, blob_size)


def _exactly(take: Callable[[int], bytes], size: int, may_end: bool = False) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = take(min(size - len(data), 1 << 20))
        if not chunk:
            if may_end and not data:
                return b""
            raise FrameError("the other side ended in the middle of a message")
        data += chunk
    return bytes(data)


# The file that holds an answer

_LENGTH = struct.Struct(">Q")
_ENCODING = ("utf-8", "surrogatepass")
"""A program may contain half a surrogate pair; the verdict is then that it does not compile."""


def pack_program(preamble: str, program: str) -> bytes:
    """Preamble and program as the content of a file."""
    first = preamble.encode(*_ENCODING)
    return _LENGTH.pack(len(first)) + first + program.encode(*_ENCODING)


def read_program(fd: int) -> tuple[str, str]:
    """Read preamble and program without moving the file offset, which all runs of the answer share."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    start, middle = _LENGTH.size, _LENGTH.size + _LENGTH.unpack_from(data)[0]
    return data[start:middle].decode(*_ENCODING), data[middle:].decode(*_ENCODING)


# Modules that programs of each role commonly import, so that a run costs only a fork. Not `threading`, which runs code
# in every fork, and not `hashlib`, which maps libraries: each of them makes every fork 50% more expensive.
PRELOADED = {
    "answer": (
        *("abc", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions"),
        *("functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re", "statistics", "string"),
        "typing",
    ),
    # a tester that serves several tests serves only tests that import no other module (`runs.leaves_no_trace`)
    "tester": (
        *("bisect", "cmath", "collections", "collections.abc", "copy", "fractions", "functools", "heapq", "itertools"),
        *("math", "operator", "random", "re", "string", "typing"),
    ),
}
"""The modules that a zygote imports before it forks, by its role."""
