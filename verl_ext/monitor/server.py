"""The web server."""

from __future__ import annotations

import os
import secrets
from collections import UserDict
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from starlette.responses import StreamingResponse

from verl_ext.monitor.access import Access
from verl_ext.monitor.csv_file import csv_lines
from verl_ext.monitor.follow import Follower
from verl_ext.monitor.store.database import open_database


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
        lines = csv_lines(database, run)
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
