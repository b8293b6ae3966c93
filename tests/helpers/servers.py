"""A server with one model that gives so many answers and then kills itself; run as a process of its own.

Arguments: port, name and root of the model, answers that it gives, text of each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Speaks as much of OpenAI's protocol as an evaluation needs."""

    name, root, left, text = sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]

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


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
