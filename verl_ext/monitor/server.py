"""The web server."""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections import UserDict
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
from starlette.responses import StreamingResponse

from verl_ext.errors import UserError
from verl_ext.monitor.access import Access
from verl_ext.monitor.follow import Follower
from verl_ext.monitor.store.database import open_database

KEYS = ("step", "attempt", "time")
SHORTEST_TOKEN = 12
"""Characters of a token for other machines, which may try as often as they like."""


def serve(root: Path, database: Path, host: str, port: int, token: str | None) -> None:
    """Follow the runs below a root and show them, until the process is asked to end.

    Args:
        root: below which runs lie.
        database: the monitor's own.
        host: address to listen on.
        port: TCP port.
        token: that visitors must bring; None on a loopback address.
    """
    os.environ.setdefault("NICEGUI_STORAGE_PATH", str(database.with_suffix(".nicegui")))
    from nicegui import app, ui

    from verl_ext.monitor.page.context import PageContext
    from verl_ext.monitor.page.main import Page

    connection = open_database(database)
    follower = Follower(database, root)
    app.add_middleware(Access, token=token)

    @ui.page("/", title="Training monitor")
    def index() -> None:
        Page(PageContext(connection, root, Remembered(app.storage.user)))

    @app.get("/csv/{run}")
    def csv(run: int) -> StreamingResponse:
        name = f"attachment; filename=metrics_{run}.csv"
        lines = csv_lines(open_database(database), run)  # its own connection: the answer is made in another thread
        return StreamingResponse(lines, media_type="text/csv", headers={"Content-Disposition": name})

    app.on_startup(follower.start)
    app.on_shutdown(follower.stop)
    ui.run(
        host=host,
        port=port,
        show=False,
        reload=False,
        show_welcome_message=False,
        storage_secret=secret_of(database),
        title="Training monitor",
    )


def secret_of(database: Path) -> str:
    """By which cookies are signed; kept beside the database, so that browsers are known after a restart."""
    path = database.with_suffix(".secret")
    with suppress(FileExistsError):  # never through a link that somebody else has put there
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(16))
    return path.read_text()


class Remembered(UserDict):
    """Settings of one page, which a new page of the same browser begins with.

    Two open pages do not disturb each other: what is set in one counts there, and for pages that are opened later.

    Args:
        kept: of the browser.
    """

    def __init__(self, kept: MutableMapping[str, Any]) -> None:
        super().__init__(kept)
        self._kept = kept

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if hasattr(self, "_kept"):  # not while it begins
            self._kept[name] = value


def csv_lines(connection: sqlite3.Connection, run: int) -> Iterator[str]:
    """A run's rows as CSV, with a column for every metric that it ever had."""
    rows = connection.execute("SELECT metrics FROM training_logs WHERE run = ? ORDER BY id", (run,))
    names = dict.fromkeys(name for (text,) in rows for name in orjson.loads(text))
    yield ",".join([*KEYS, *(_cell(name) for name in names)]) + "\n"
    query = "SELECT step, attempt, time, metrics FROM training_logs WHERE run = ? ORDER BY id"
    for step, attempt, time, text in connection.execute(query, (run,)):
        metrics = orjson.loads(text)
        yield ",".join([str(step), str(attempt), str(time), *(_cell(metrics.get(name, "")) for name in names)]) + "\n"


def _cell(value: object) -> str:
    """Quoted where CSV needs it; what a spreadsheet would take for a formula gets a quote in front."""
    text = str(value)
    if isinstance(value, str) and text.startswith(("=", "+", "-", "@", "\t", "\r")) and text != "-Infinity":
        text = f"'{text}"
    return '"' + text.replace('"', '""') + '"' if any(each in text for each in ',"\n\r') else text


def require_token(host: str, token: str | None, is_loopback: bool) -> None:
    """Refuse to show the page to other machines without a token, or with one that can be guessed.

    Raises:
        UserError: no token for an address that others can reach, or too short a one.
    """
    if not is_loopback and not token:
        raise UserError(
            f"--host {host} lets other machines in, so visitors must bring a token; add --token WORD, or set "
            "VERL_EXT_MONITOR_TOKEN"
        )
    if not is_loopback and len(token or "") < SHORTEST_TOKEN:
        raise UserError(
            f"the token has fewer than {SHORTEST_TOKEN} characters, which other machines can guess; take one such as "
            f"{secrets.token_urlsafe(16)}"
        )
