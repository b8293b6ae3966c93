"""A real monitor, a real browser that visits it, and run directories as a trainer writes them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.helpers import ROOT
from tests.helpers.processes import WAIT_S, free_port, wait_until
from verl_ext.metrics.jsonl import MetricsFile

if TYPE_CHECKING:
    from verl_ext.monitor.follower import RunFollower

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIMULATED_METRICS = ("train/loss", "train/grad_norm", "train/lr(1e-3)", "time/train/step_s")
DATA = """name => {
  const box = document.querySelector(`[data-testid="chart ${name}"]`);
  const chart = box && getElement(parseInt(box.id.slice(1)))?.chart;
  if (!chart) return [];  // it is being replaced
  return chart.getOption().series.map(line => ({name: line.name, data: line.data,
    marks: (line.markLine && line.markLine.data || []).map(mark => mark.xAxis ?? mark.yAxis)}));
}"""


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """Headless Chromium; without one the test is skipped."""
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed; `bash tests/run.sh --install` installs it")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@contextlib.contextmanager
def monitor(root: Path, database: Path, *words: str, host: str = "127.0.0.1") -> Iterator[str]:
    """Run `python -m verl_ext.monitor` on a free port and return its address."""
    port = free_port(host)
    command = [sys.executable, "-m", "verl_ext.monitor", "--root", str(root), "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # makes NiceGUI believe that it is being tested
    command += ["--host", host, "--database", str(database), *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    address = f"http://{host}:{port}/"
    try:
        wait_until(lambda: answers(address), process, pause_s=0.1)
        yield address
    finally:
        process.terminate()
        process.wait(WAIT_S)


def answers(address: str) -> bool:
    """Whether a server responds there, with any status."""
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def visit(running: Browser, address: str) -> Iterator[Page]:
    """A new visitor's page; it must not contact other machines, open a dialog, or raise an error in the browser."""
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
    """Choose a run; its charts follow, see `until_passes`."""
    page.get_by_test_id("run").click()
    page.get_by_role("option").filter(has_text=run).first.click()
    expect(page.get_by_test_id("run")).to_have_value(re.compile(re.escape(run)))
    wait_for_text(page, "shown", run)


def open_tab(page: Page, name: str) -> None:
    """Open another tab of the page."""
    page.get_by_test_id(f"tab {name}").click()


def until_passes(check: Callable[[], None], timeout_s: float = 60) -> None:
    """Call a function until its assertions hold; after the timeout, its last error is raised.

    The page updates itself a few times per second, so what it shows is compared until it agrees. A chart that has fewer
    or more lines than expected may raise a `LookupError` or a `ValueError`, which counts as an assertion that fails.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return check()
        except (AssertionError, LookupError, ValueError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def series(page: Page, chart: str) -> list[dict[str, Any]]:
    """The lines that a chart shows now: name, points and marked places of each."""
    page.wait_for_selector(f'[data-testid="chart {chart}"] canvas')
    return page.evaluate(DATA, chart)


def text(page: Page, name: str) -> str:
    """The text of an element."""
    return page.get_by_test_id(name).first.inner_text()


def wait_for_text(page: Page, name: str, wanted: str) -> None:
    """Wait until an element contains a text."""
    expect(page.get_by_test_id(name).first).to_contain_text(wanted, timeout=60_000, use_inner_text=True)


def copy_run(run_dir: Path, destination: Path, *steps: int) -> Path:
    """Copy a run for a monitor, with the checkpoints of these steps only."""
    kept = {f"global_step_{step}" for step in steps}

    def left_out(directory: str, names: list[str]) -> set[str]:
        return {name for name in names if name == "wandb" or (name.startswith("global_step_") and name not in kept)}

    return Path(shutil.copytree(run_dir, destination, ignore=left_out))


def write_record(run_dir: Path, status: str = "running", total_steps: int = 100, **attempts: int) -> None:
    """Write `run.json`; `attempts` are `aN=first step`."""
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
    """Append rows to `metrics.jsonl`; `train/loss` is the step unless it is given."""
    file = MetricsFile(run_dir / "metrics.jsonl", attempt)
    for step in steps:
        file.append(step, {"train/loss": float(step), **{f"train/{name}": value for name, value in metrics.items()}})
    file.close()


@contextlib.contextmanager
def following(root: Path) -> Iterator[RunFollower]:
    """A follower without its thread that has looked at a root once."""
    from verl_ext.monitor.follower import RunFollower

    follower = RunFollower(root.parent / "monitor.sqlite", root)
    look(follower)
    try:
        yield follower
    finally:
        follower.stop()


def look(follower: RunFollower) -> None:
    """One iteration of the follower's thread, without the thread."""
    for run in follower.find_runs():
        while follower._read_or_warn(run):
            pass
    follower._refresh_runs()


def query(follower: RunFollower, text: str) -> list[sqlite3.Row]:
    return follower._database._connection.execute(text).fetchall()


def count(follower: RunFollower, table: str) -> int:
    return query(follower, f"SELECT count(*) FROM {table}")[0][0]


def points(follower: RunFollower, path: str, metric: str = "train/loss") -> tuple[list[float], list[float]]:
    """The points that a page draws for a metric."""
    x, values = follower.curves(follower.runs[path]).envelopes[metric].points()
    return x.tolist(), values.tolist()


def step_of(follower: RunFollower, path: str = "p/e") -> int:
    return follower.curves(follower.runs[path]).step


def levels(follower: RunFollower) -> dict[str | None, str]:
    """The current level of each rule that has reported something."""
    return {event.rule: event.kind for event in follower.runs["p/e"].findings}


def write_evaluation(run_dir: Path, step: int, **datasets: Any) -> Path:
    path = run_dir / f"eval/eval_step_{step}/metrics.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"step": step, "datasets": datasets}))
    return path


def assert_update_cost_is_flat(directory: Path, num_parts: int, steps_per_part: int) -> None:
    """Simulate a run of ten steps per second: neither the memory of its curves nor the work of a look grows with it.

    Args:
        directory: an empty one.
        num_parts: number of parts of the run; memory and work are measured after each.
        steps_per_part: above the number of points that a chart shows.
    """
    from verl_ext.monitor.curves import MAX_POINTS
    from verl_ext.monitor.follower import RunFollower

    assert steps_per_part >= MAX_POINTS
    num_steps = num_parts * steps_per_part
    run_dir, path = directory / "checkpoints/p/e", directory / "checkpoints/p/e/metrics.jsonl"
    write_record(run_dir, total_steps=num_steps)
    follower = RunFollower(directory / "monitor.sqlite", directory / "checkpoints")
    works, sizes, done = [], [], 0
    for part in range(1, num_parts + 1):
        end = part * steps_per_part
        _write_steps(path, done, end - 3)
        look(follower)
        run = follower.runs["p/e"]
        curves = follower.curves(run)
        _write_steps(path, end - 3, end)  # the steps of 0.3 s
        works.append(_work_of_look(follower, run.id))
        assert curves is follower.curves(run) and curves.step == end
        assert all(len(curves.envelopes[metric].points()[0]) <= MAX_POINTS for metric in SIMULATED_METRICS)
        sizes.append(sum(each.segments.nbytes + each.pending.nbytes for each in curves.envelopes.values()))
        done = end
    assert curves.envelopes["train/loss"].num_points == num_steps
    assert max(works) <= 1.5 * works[0], works
    half = num_parts // 2
    assert max(sizes[half:]) <= 1.2 * max(sizes[:half]) and max(sizes) < 1_000_000, sizes
    rows = follower.reader.rows(run.id)
    assert [row.step for row in rows] == [*range(1, num_steps + 1)]  # no step is lost
    follower.stop()


def _write_steps(path: Path, begin: int, end: int) -> None:
    with open(path, "a") as file:
        for step in range(begin + 1, end + 1):
            values = ", ".join(f'"{name}": {step % 97 / 97}' for name in SIMULATED_METRICS)
            file.write(f'{{"step": {step}, "attempt": 1, "time": {step / 10}, {values}}}\n')


def _work_of_look(follower: RunFollower, run: int) -> int:
    """Instructions of SQLite's virtual machine to read the new rows of a run."""
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    connection = follower._database._connection
    connection.set_progress_handler(note, 1)
    assert follower.read_new_rows(run)
    connection.set_progress_handler(None, 0)
    return count
