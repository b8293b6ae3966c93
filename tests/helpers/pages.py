"""The monitor's panels on a simulated client, without a browser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from nicegui import Client, ui

from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.panels import Panel
from verl_ext.monitor.state import PageState


def on_client(check: Callable[[Client], Awaitable[None]]) -> None:
    """Call a function within a page that no server sends and no timer updates."""

    async def call() -> None:
        with Client(ui.page("")) as client:
            await check(client)

    asyncio.run(call())


def element(client: Client, name: str) -> Any:
    """The element that has this `data-testid`."""
    [found] = [each for each in client.elements.values() if each.props.get("data-testid") == name]
    return found


def panel_of(kind: type[Panel], follower: RunFollower, state: PageState) -> Any:
    """A panel whose state changes are not passed to a page."""
    return kind(follower, state, lambda push=True, **changes: vars(state).update(changes))


def texts_of(shown: ui.element) -> list[str]:
    """The texts of all labels in an element."""
    return [each.text for each in shown.descendants() if isinstance(each, ui.label)]
