"""The web server: serves the page, and the rows of a run as CSV."""

from __future__ import annotations

import csv
import gc
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from verl_ext.metrics.jsonl import KEY_COLUMNS
from verl_ext.monitor.access import TokenAuth, cookie_of
from verl_ext.monitor.database import MonitorDatabase
from verl_ext.monitor.follower import RunFollower

TITLE = "Training monitor"
RECONNECT_S = 15.0
"""Seconds for which a page whose connection is slow or interrupted keeps its state."""
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Prefixes of texts that a spreadsheet evaluates as formulas."""
BLOCK_LINES = 1000
"""Number of lines to send at a time; sending each line by itself takes longer than reading it."""


def serve(root: Path, database: Path, host: str, port: int, token: str | None) -> None:
    """Follow the runs below a root and show them until the process is stopped; see `TokenAuth` for `token`."""
    os.environ.setdefault("NICEGUI_STORAGE_PATH", str(database.with_suffix(".nicegui")))
    from nicegui import app, ui

    from verl_ext.monitor.page import MonitorPage
    from verl_ext.monitor.state import PageState

    follower = RunFollower(database, root)
    app.add_middleware(TokenAuth, token=token)

    @ui.page("/", title=TITLE)
    def index(request: Request) -> None:
        MonitorPage(follower, PageState.from_query(str(request.url.query), app.storage.user))

    @app.get("/csv/{path:path}")
    def download(path: str) -> Response:
        return csv_response(follower, path)

    app.on_startup(gc.freeze)  # modules are never freed; scanning them in a collection delays pages by 0.1 s
    app.on_startup(follower.start)
    app.on_shutdown(follower.stop)
    secret = cookie_secret(database)
    ui.run(
        host=host,
        port=port,
        show=False,
        reload=False,
        show_welcome_message=False,
        storage_secret=secret,
        session_middleware_kwargs={"session_cookie": cookie_of(secret, "verl_ext_monitor_session")},
        title=TITLE,
        reconnect_timeout=RECONNECT_S,
    )


def cookie_secret(database: Path) -> str:
    """Return the key that signs cookies; it is stored next to the database, so that cookies outlive a restart."""
    path = database.with_suffix(".secret")
    with suppress(FileExistsError):  # never through a link that another user created
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()


# CSV


def csv_response(follower: RunFollower, path: str) -> Response:
    """Return the rows of a run as a download; `path` is empty for a root that is a run: browsers shorten `csv/.`."""
    run = follower.runs.get(path or ".")
    if run is None:
        return PlainTextResponse("No run has this path.\n", 404)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", path or follower.root.name)
    headers = {"Content-Disposition": f"attachment; filename=metrics_{name}.csv"}
    return StreamingResponse(csv_blocks(follower.database_path, run.id), media_type="text/csv", headers=headers)


class _LineBuffer:
    """A file for `csv.writer` that makes `writerow` return the line."""

    @staticmethod
    def write(line: str) -> str:
        return line


def csv_blocks(database: Path, run: int) -> Iterator[str]:
    """Yield `csv_lines` in blocks."""
    lines = csv_lines(database, run)
    for first in lines:
        yield "".join(chain([first], islice(lines, BLOCK_LINES - 1)))


def csv_lines(database: Path, run: int) -> Iterator[str]:
    """Yield the rows of a run as CSV lines, with a column for every metric."""
    writer = csv.writer(_LineBuffer(), lineterminator="\n")
    with closing(
        MonitorDatabase(database)
    ) as reader:  # its own connection, because the server streams in other threads
        names = dict.fromkeys(name for row in reader.rows(run) for name in row.metrics)
        yield writer.writerow([*KEY_COLUMNS, *map(escape_formula, names)])
        for row in reader.rows(run):
            values = (escape_formula(row.metrics.get(name, "")) for name in names)
            yield writer.writerow([row.step, row.attempt, row.time, *values])


def escape_formula(value: Any) -> Any:
    """Return a value, with a quote in front of text that a spreadsheet would evaluate."""
    is_formula = isinstance(value, str) and value.startswith(_FORMULA_STARTS) and value != "-Infinity"
    return f"'{value}" if is_formula else value
