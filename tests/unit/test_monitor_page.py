"""Panels of the monitor's page on a simulated client, without a browser."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from nicegui import Client, ui

from tests.helpers.monitor import write_record, write_rows
from verl_ext.config.schema import to_yaml
from verl_ext.monitor.page import main
from verl_ext.monitor.page.compare import ComparePanel
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.page.health import HealthPanel
from verl_ext.monitor.page.main import Page
from verl_ext.monitor.store.database import open_database
from verl_ext.monitor.store.ingest import Ingest
from verl_ext.trainer.stages import load_config


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With one live run of five steps, `p/old`."""
    root = tmp_path / "checkpoints"
    write_record(root / "p/old")
    write_rows(root / "p/old", 1, range(1, 6))
    return root


def context_of(root: Path, database: str = "monitor", **settings: Any) -> PageContext:
    context = PageContext(open_database(root.parent / f"{database}.sqlite"), root, settings)
    take(context.connection, root)
    return context


def take(connection: sqlite3.Connection, root: Path) -> None:
    ingest = Ingest(connection, root)
    for run in ingest.find_runs():
        ingest.take_all(run)


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


def names_of(select: ui.select) -> dict[str, Any]:
    """What a selector offers: the shown name and the value of each option."""
    options = select.options
    return {name: value for value, name in options.items()} if isinstance(options, dict) else {n: n for n in options}


def bytes_read() -> int:
    """By this process until now."""
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.xfail(strict=True, reason="the Health tab reads all rows of a run again after every new one")
def test_health_tab_does_not_read_a_growing_run_again_and_again(root: Path) -> None:
    (root / "p/old/config.yaml").write_text(to_yaml(load_config("sft", [])))
    write_rows(root / "p/old", 1, range(6, 4000))
    size = (root / "p/old/metrics.jsonl").stat().st_size
    context = context_of(root)

    async def check(client: Client) -> None:
        assert (view := context.chosen) is not None
        panel = HealthPanel(context)
        await panel.show(view)
        assert len(client.elements) > 20
        write_rows(root / "p/old", 1, range(4000, 4001))
        before = bytes_read()
        await panel.show(view)
        assert bytes_read() - before < size / 2

    on_client(check)


@pytest.mark.xfail(strict=True, reason="every look for runs parses every evaluation of every run")
def test_evaluations_that_did_not_change_are_not_read_again(root: Path) -> None:
    path = root / "p/old/eval/eval_step_4/metrics.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"datasets": {"gsm8k": {"accepted_at_1": 0.5, "notes": "x" * (1 << 20)}}}))
    ingest = Ingest(context_of(root).connection, root)
    before = bytes_read()
    ingest.find_runs()
    assert bytes_read() - before < 1 << 19


@pytest.mark.xfail(strict=True, reason="the selector of Compare is filled once, when the tab is opened")
def test_compare_offers_runs_that_start_while_it_is_open(root: Path) -> None:
    context = context_of(root)

    async def check(client: Client) -> None:
        assert (view := context.chosen) is not None
        panel = ComparePanel(context)
        panel.show(view)
        write_record(root / "p/new")
        take(context.connection, root)
        panel.show(view)
        assert names_of(element(client, "compared")).keys() == {"p/old", "p/new"}

    on_client(check)


@pytest.mark.xfail(strict=True, reason="the remembered selection holds ids, which a new database gives to other runs")
def test_compare_remembers_runs_and_not_places_in_a_database(root: Path) -> None:
    write_record(root / "p/chosen")  # its id is 1, and 2 once `p/before` is there
    settings = context_of(root).settings

    async def check(client: Client) -> None:
        ComparePanel(context_of(root))
        select = element(client, "compared")
        settings["compared"] = [names_of(select)["p/chosen"]]
        write_record(root / "p/before")
        client.layout.clear()
        ComparePanel(context_of(root, "another_database", **settings))
        select = element(client, "compared")
        assert select.value == [names_of(select)["p/chosen"]]

    on_client(check)


@pytest.mark.parametrize(
    "tab",
    [
        pytest.param(
            name,
            marks=pytest.mark.xfail(strict=True, reason="status and progress wait for the slow tab's next look")
            if name in main.SLOW
            else (),
        )
        for name in main.PANELS
    ],
)
def test_status_follows_the_run_whatever_tab_is_open(tab: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "SLOW_S", 1e9)
    context = context_of(root, tab=tab)

    async def check(client: Client) -> None:
        page = Page(context)
        await page._update()
        assert element(client, "figure Current step").text == "5"
        write_rows(root / "p/old", 1, range(6, 8))
        take(context.connection, root)
        await page._update()
        assert element(client, "figure Current step").text == "7"

    on_client(check)
