"""The monitor as people use it: real runs, a real server, a real browser."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.helpers.commands import NUM_STEPS, Run
from tests.helpers.monitor import browser, choose, monitor, open_tab, series, text, visit, wait_for_text
from verl_ext.metrics.jsonl import read_metrics

HOSTILE = "<img src=x onerror=alert(1)>"
ON_THE_PAGE = ["Loss", "Perplexity"]
IN_THE_FOLD = [
    *("Gradient norm", "Learning rate and its schedule", "Evaluation loss", "Training speed", "Time by part"),
    "Memory and disk",
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture(scope="module")
def root(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the quickstart: one that was finished and then prolonged from step 4, one that failed, a hostile name."""
    root = tmp_path_factory.mktemp("monitored") / "checkpoints"
    run = Run(quickstart, root / "project/restarted", "trainer.val_before_train=true", "trainer.test_freq=2")
    assert run.start().returncode == 0
    again = (f"trainer.resume_from_path={run.run_dir}/global_step_4", "trainer.resume_mode=resume_path")
    assert run.start(*again, f"trainer.total_training_steps={NUM_STEPS + 2}").returncode == 0
    failed = Run(quickstart, root / "project/failed", "optim.lr=1e30", "optim.lr_warmup_steps_ratio=0.0")
    assert failed.start().returncode == 2
    shutil.copytree(root / "project/failed", root / "project" / HOSTILE)
    return root


@pytest.fixture(scope="module")
def address(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with monitor(root, tmp_path_factory.mktemp("database") / "monitor.sqlite") as address:
        yield address


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    with visit(chromium, address) as page:
        yield page


def test_every_chart_is_there_with_the_last_value_and_restarts_lie_behind_each_other(page: Page, root: Path) -> None:
    choose(page, "restarted")
    page.get_by_test_id("fold").get_by_text("Other charts").click()
    rows = read_metrics(root / "project/restarted/metrics.jsonl")
    for chart in [*ON_THE_PAGE, *IN_THE_FOLD]:
        for line in series(page, chart):
            values = [row[line["name"]] for row in rows if line["name"] in row]
            if not values:  # the schedule
                assert chart == "Learning rate and its schedule" and len(line["data"]) == NUM_STEPS + 2
                continue
            scale = 1e-3 if line["name"] == "train/lr(1e-3)" else 1
            assert [value for _, value in line["data"]] == pytest.approx([value * scale for value in values], rel=1e-5)
    [loss] = series(page, "Loss")
    assert [place for place, _ in loss["data"]] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # steps 1 to 6, then 5 to 8
    assert loss["marks"] == [NUM_STEPS]
    assert text(page, "figure Current step") == "8" and text(page, "status") == "finished"
    assert text(page, "mode") == "History" and text(page, "figure Progress") == "100.0%"


def test_a_failed_run_is_red_with_its_reason(page: Page) -> None:
    choose(page, "project/failed")
    wait_for_text(page, "status", "failed")
    colour = page.get_by_test_id("status").evaluate("box => getComputedStyle(box).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    assert red > 180 and green < 100 and blue < 100
    assert "not finite" in text(page, "reason")


def test_hostile_names_are_text(page: Page) -> None:
    choose(page, HOSTILE)
    wait_for_text(page, "status", "failed")
    open_tab(page, "Compare")
    page.wait_for_timeout(700)
    assert page.locator(".q-chip").inner_text().count(HOSTILE) == 1
    assert page.locator("img[src='x']").count() == 0


def test_a_run_is_followed_while_it_trains(page: Page, root: Path, quickstart: Path) -> None:
    run = Run(quickstart, root / "project/live", "trainer.total_training_steps=40", "trainer.save_freq=-1")
    training = threading.Thread(target=run.start)
    training.start()
    choose(page, "project/live")  # it appears in the open list
    wait_for_text(page, "mode", "Live")
    seen = set()
    while training.is_alive():
        seen.add(text(page, "figure Current step"))
        page.wait_for_timeout(100)
    training.join()
    assert len(seen) > 4, seen  # it grew while it was looked at
    wait_for_text(page, "figure Current step", "40")
    wait_for_text(page, "mode", "History")
    last = read_metrics(run.run_dir / "metrics.jsonl")
    losses = [row["train/loss"] for row in last if "train/loss" in row]
    page.wait_for_timeout(1000)
    smoothed, raw = series(page, "Loss")
    assert [value for _, value in raw["data"]] == pytest.approx(losses, rel=1e-5)
    assert len(smoothed["data"]) == 40 and smoothed["data"] != raw["data"]
    slider = page.get_by_test_id("smoothing")
    box = slider.bounding_box()
    slider.click(position={"x": 1, "y": box["height"] / 2})  # none of it
    page.wait_for_timeout(1000)
    [alone] = series(page, "Loss")
    assert alone["data"] == raw["data"]
    slider.click(position={"x": box["width"] - 1, "y": box["height"] / 2})  # as much as there is
    page.wait_for_timeout(1000)
    smoother, behind = series(page, "Loss")
    spread = [
        max(y for _, y in line["data"]) - min(y for _, y in line["data"]) for line in (smoother, smoothed, behind)
    ]
    assert behind["data"] == raw["data"] and spread[0] < spread[1] < spread[2]


def test_the_log_is_searched(page: Page) -> None:
    choose(page, "restarted")
    open_tab(page, "Log")
    wait_for_text(page, "log", "attempt 2 began at step 4")
    page.get_by_test_id("search").fill("val/loss")
    wait_for_text(page, "found", "val/loss")
    assert "attempt 2 began" not in text(page, "found")


def test_language_tab_and_darkness_are_remembered(page: Page) -> None:
    choose(page, "restarted")
    page.get_by_test_id("language").get_by_text("中文").click()
    page.wait_for_function("() => document.body.innerText.includes('训练监控')")
    page.get_by_test_id("dark").click()
    open_tab(page, "Checkpoints")
    wait_for_text(page, "checkpoints", "global_step_8")
    page.reload()
    wait_for_text(page, "checkpoints", "global_step_8")
    assert "训练监控" in page.inner_text("body") and "已完成" in text(page, "status")
    assert page.evaluate("() => document.body.classList.contains('body--dark')")


def test_health_is_shown(page: Page) -> None:
    choose(page, "restarted")
    open_tab(page, "Health")
    wait_for_text(page, "health", "loss_not_finite")
    assert "At every checkpoint" in text(page, "health")


def test_numbers_are_downloaded(page: Page, root: Path) -> None:
    choose(page, "restarted")
    with page.expect_download() as download:
        page.get_by_test_id("csv").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 1 + len(read_metrics(root / "project/restarted/metrics.jsonl"))
    assert lines[0].startswith("step,attempt,time,")


def test_other_machines_need_the_token(chromium: Browser, root: Path, tmp_path: Path) -> None:
    with monitor(root, tmp_path / "monitor.sqlite", "--token", "secret", host="127.0.0.2") as address:
        page = chromium.new_page()
        assert page.goto(address).status == 403
        assert page.goto(f"{address}?token=wrong").status == 403
        assert page.goto(f"{address}?token=secret").status == 200
        page.get_by_test_id("run").wait_for()
        assert page.goto(address).status == 200  # by the cookie
        page.get_by_test_id("figure Current step").wait_for()  # the web socket was let through
        page.close()


def test_an_empty_root_says_so(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with monitor(tmp_path / "checkpoints", tmp_path / "monitor.sqlite") as address:
        page = chromium.new_page()
        page.goto(address)
        wait_for_text(page, "empty", "No run yet")
        page.close()


def test_a_plotted_page_needs_nothing_else(chromium: Browser, root: Path, tmp_path: Path) -> None:
    from verl_ext.monitor.__main__ import main

    assert main(["plot", str(root / "project/restarted"), "--output", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {re.sub(r"[^a-z0-9]+", "_", name.lower()) + ".png" for name in [*ON_THE_PAGE, *IN_THE_FOLD]}
    context = chromium.new_context(offline=True)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((tmp_path / "charts.html").as_uri())
    page.wait_for_selector("section:last-of-type canvas")
    assert page.locator("canvas").count() == len(names) and errors == []
    assert json.loads(page.locator("#charts").text_content())[0]["series"][0]["data"][-1][0] == 10
    context.close()
