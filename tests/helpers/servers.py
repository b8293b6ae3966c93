"""A server with one model that speaks OpenAI's protocol and kills itself after a number of answers.

`python -m tests.helpers.servers PORT NAME ROOT NUM_ANSWERS TEXT` is the server; it prints its port.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.helpers import ROOT

FOR_EVER = 1_000_000
ANSWER = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"
"""Solves the problems of `helpers.evaluation.slow_problems`."""


@contextmanager
def serving(
    name: str = "tiny", root: str = "org/tiny", port: int = 0, num_answers: int = FOR_EVER, text: str = ANSWER
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server; its process and its port.

    Args:
        name: model name in requests.
        root: the path that the server reports for the model.
        port: 0 for any free one.
        num_answers: the server kills itself at the next request.
        text: text of every answer.
    """
    words = ["-m", "tests.helpers.servers", str(port), name, root, str(num_answers), text]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Handler(BaseHTTPRequestHandler):
    """Implements as much of OpenAI's protocol as an evaluation needs."""

    name, root, left, text = "", "", 0, ""

    def do_GET(self) -> None:
        self._send({"object": "list", "data": [{"id": self.name, "object": "model", "root": self.root}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if Handler.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        Handler.left -= 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": self.text}}
        usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
        about = {"id": "1", "object": "chat.completion", "created": 0, "model": self.name}
        self._send({**about, "choices": [choice], "usage": usage})

    def _send(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def main(port: str, name: str, root: str, num_answers: str, text: str) -> None:
    """Serve until killed."""
    Handler.name, Handler.root, Handler.left, Handler.text = name, root, int(num_answers), text
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
