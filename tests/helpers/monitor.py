"""A real monitor, a real browser that looks at it, and run directories as a trainer writes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.helpers import ROOT
from verl_ext.metrics.jsonl import MetricsFile

START_S = 60
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
DATA = """name => {
  const box = document.querySelector(`[data-testid="chart ${name}"]`);
  const chart = getElement(parseInt(box.id.slice(1))).chart;
  return chart.getOption().series.map(line => ({name: line.name, data: line.data,
    marks: (line.markLine && line.markLine.data || []).map(mark => mark.xAxis ?? mark.yAxis)}));
}"""


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Headless Chromium; without one the test is skipped."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed; tests/run.sh installs Debian's where it may")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@contextlib.contextmanager
def monitor(root: Path, database: Path, *words: str, host: str = "127.0.0.1") -> Iterator[str]:
    """`python -m verl_ext.monitor` on a free port; its address."""
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "verl_ext.monitor", "--root", str(root), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # by which NiceGUI would take itself to be tested
    command += ["--host", host, "--database", str(database), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    address = f"http://{host}:{port}/"
    try:
        _wait_for(address, process)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def _wait_for(address: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it refuses, so it is there
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the monitor does not answer"
            time.sleep(0.1)


@contextlib.contextmanager
def visit(running: Browser, address: str) -> Iterator[Page]:
    """A fresh visitor's page; nothing it does may leave this machine, open a dialog, or raise in the browser."""
    context = running.new_context(viewport={"width": 1400, "height": 1000})
    page, strays, dialogs, errors = context.new_page(), [], [], []
    local = re.compile(rf"^({re.escape(address)}|ws://{re.escape(address[7:])}|data:|blob:)")
    page.on("request", lambda request: strays.append(request.url) if not local.match(request.url) else None)
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(address)
    yield page
    context.close()
    assert (strays, dialogs, errors) == ([], [], [])


def choose(page: Page, run: str) -> None:
    """Look at another run."""
    page.get_by_test_id("run").click()
    page.get_by_role("option").filter(has_text=run).first.click()
    expect(page.get_by_test_id("run")).to_have_value(re.compile(re.escape(run)))
    wait_for_text(page, "shown", run)
    page.wait_for_timeout(500)  # the browser draws what it has got


def open_tab(page: Page, name: str) -> None:
    """Look at another part of the page."""
    page.get_by_test_id(f"tab {name}").click()


def series(page: Page, chart: str) -> list[dict[str, Any]]:
    """What a chart shows: name, points and marked places of each of its lines."""
    page.wait_for_selector(f'[data-testid="chart {chart}"] canvas')
    return page.evaluate(DATA, chart)


def text(page: Page, name: str) -> str:
    """What an element says."""
    return page.get_by_test_id(name).first.inner_text()


def wait_for_text(page: Page, name: str, wanted: str) -> None:
    """Until an element says something."""
    page.wait_for_function(
        '([name, wanted]) => { const box = document.querySelector(`[data-testid="${name}"]`);'
        " return box && box.innerText.includes(wanted); }",
        arg=[name, wanted],
        timeout=60_000,
    )


def write_record(run_dir: Path, status: str = "running", total_steps: int = 100, **attempts: int) -> None:
    """`run.json`; `attempts` are `aN=first step`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    listed: list[Mapping[str, Any]] = [
        {
            **{"attempt": int(name[1:]), "start": f"2026-01-01T00:0{name[1:]}:00+00:00", "first_step": first},
            **{"end": None, "last_step": None, "world_size": 2, "exit_reason": None, "host": "h", "pid": 1},
        }
        for name, first in (attempts or {"a1": 0}).items()
    ]
    run = {"status": status, "project": "p", "experiment": run_dir.name, "stage": "sft", "recipe": "r"}
    (run_dir / "run.json").write_text(json.dumps({**run, "total_steps": total_steps, "attempts": listed}))


def write_rows(run_dir: Path, attempt: int, steps: range, **metrics: float) -> None:
    """Rows of `metrics.jsonl`: `train/loss` is the step unless given, other names as given."""
    file = MetricsFile(run_dir / "metrics.jsonl", attempt)
    for step in steps:
        file.append(step, {"train/loss": float(step), **{f"train/{name}": value for name, value in metrics.items()}})
    file.close()
