"""The monitor on a phone's width, and by keyboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from tests.helpers.monitor import monitor, until_passes, visit, wait_for_text, write_record, write_rows
from verl_ext.monitor.colors import TEXTS
from verl_ext.monitor.state import TABS

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser, FloatRect, Locator, Page

LONG = "a_long_name_of_an_experiment_" * 2


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A monitor of two runs with samples, an evaluation and a warning."""
    root = tmp_path_factory.mktemp("keyboard") / "checkpoints"
    for name in ("one", LONG):
        run_dir = root / "p" / name
        write_record(run_dir)
        record = json.loads((run_dir / "run.json").read_text())
        record["attempts"][0] |= {"command": f"bash run_sft.sh {LONG}", "environment": {LONG: LONG}}
        (run_dir / "run.json").write_text(json.dumps(record))
        (run_dir / "config.yaml").write_text(f"stage: sft\ndata: {{train_files: {LONG}}}\n")
        write_rows(run_dir, 1, range(1, 8))
        rows = [{"step": step, "prompt": f"prompt {step} {LONG}", "answer": "a"} for step in (1, 2, 3)]
        (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        event = {"time": 1e9, "step": 1, "level": "warning", "name": "loss_zero", "text": f"it is 0; {LONG}"}
        (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
        path = run_dir / "eval/eval_step_4/metrics.json"
        path.parent.mkdir(parents=True)
        rate = 0.25 if name == "one" else 0.5
        path.write_text(json.dumps({"datasets": {f"dataset_{LONG}": {"accepted_at_1": rate}}}))
    with monitor(root, root.parent / "monitor.sqlite") as address:
        yield address


def equal(one: str, other: str) -> None:
    assert one == other


def open_run(page: Page, address: str, run: str) -> None:
    page.goto(f"{address}?run=p/{run}")
    wait_for_text(page, "shown", f"p/{run}")


def test_no_tab_scrolls_sideways_on_a_phone(chromium: Browser, address: str) -> None:
    with visit(chromium, address) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        wait_for_text(page, "runs", "p/one")
        widths = {"runs": page.evaluate("document.documentElement.scrollWidth")}
        open_run(page, address, LONG)
        for number, tab in enumerate(TABS, start=1):
            page.keyboard.press(str(number))
            expect(page.get_by_test_id(f"tab {tab}")).to_have_attribute("aria-selected", "true")
            page.wait_for_load_state("networkidle")
            widths[tab] = page.evaluate("document.documentElement.scrollWidth")
        assert {name: width for name, width in widths.items() if width > 390} == {}


def test_names_arrows_and_tooltips_fit_on_a_phone(chromium: Browser, address: str) -> None:
    with visit(chromium, address) as page:
        page.set_viewport_size({"width": 375, "height": 844})
        until_passes(lambda: assert_name_wraps(page))
        open_run(page, address, LONG)
        until_passes(lambda: assert_arrow_is_free(page))
        page.get_by_test_id("chart Loss").hover()
        expect(page.locator(".chart-tooltip").first).to_contain_text("train/loss")
        until_passes(lambda: assert_tooltip_fits(page))


def assert_name_wraps(page: Page) -> None:
    assert box_of(page.get_by_test_id("runs").get_by_role("link", name=f"p/{LONG}"))["width"] <= 240


def assert_arrow_is_free(page: Page) -> None:
    """The arrow that scrolls the tabs is not over their labels."""
    content, arrow = (box_of(page.locator(f".q-tabs__{part}")) for part in ("content", "arrow--right"))
    assert content["x"] + content["width"] <= arrow["x"] + 1


def assert_tooltip_fits(page: Page) -> None:
    tooltip = box_of(page.locator(".chart-tooltip").first)
    assert 0 <= tooltip["x"] and tooltip["x"] + tooltip["width"] <= 375


def box_of(element: Locator) -> FloatRect:
    """The place of an element; it may be replaced at any time, see `until_passes`."""
    box = element.bounding_box()
    assert box is not None
    return box


def test_updates_keep_the_focus(chromium: Browser, tmp_path: Path) -> None:
    run_dir = tmp_path / "checkpoints/p/one"
    write_record(run_dir)
    write_rows(run_dir, 1, range(1, 8))
    with monitor(run_dir.parents[1], tmp_path / "monitor.sqlite") as address, visit(chromium, address) as page:
        wait_for_text(page, "runs", "7 / 100")
        focusable = (("checkbox", "p/one"), ("link", "p/one"), ("columnheader", "Loss"))
        for step, (role, name) in enumerate(focusable, start=8):
            element = page.get_by_role(role, name=name, exact=True)
            element.focus()
            write_rows(run_dir, 1, range(step, step + 1))
            wait_for_text(page, "runs", f"{step} / 100")
            expect(element).to_be_focused()


def test_updates_keep_the_selected_text(chromium: Browser, tmp_path: Path) -> None:
    run_dir = tmp_path / "checkpoints/p/one"
    write_record(run_dir)
    with monitor(run_dir.parents[1], tmp_path / "monitor.sqlite") as address, visit(chromium, address) as page:

        def log(number: int) -> None:
            event = {"time": number, "step": 1, "level": "warning", "name": f"rule{number}", "text": "it is 0"}
            for name, line in (("events.jsonl", json.dumps(event)), ("console.log", f"line {number}")):
                with open(run_dir / name, "a") as file:
                    file.write(line + "\n")
            write_rows(run_dir, 1, range(number, number + 1))

        def assert_keeps_text(element: str, shown: Locator, number: int, news: str) -> None:
            shown.evaluate("box => getSelection().selectAllChildren(box)")
            selected = page.evaluate("() => getSelection().toString()")
            log(number)
            wait_for_text(page, element, news)
            assert selected and page.evaluate("() => getSelection().toString()") == selected

        for number in range(1, 8):
            log(number)
        page.get_by_test_id("earlier").get_by_text("Earlier warnings (2)").click()
        alarms = page.get_by_test_id("alarm")
        expect(alarms.last).to_be_visible()
        alarms.last.focus()
        assert_keeps_text("alarms", alarms.nth(1), 8, "rule8")
        expect(alarms.last).to_be_focused()
        page.goto(f"{address}?run=p/one&tab=Log&log_source=console")
        wait_for_text(page, "log", "line 8")
        assert_keeps_text("log", page.get_by_test_id("log").get_by_text("line 7"), 9, "line 9")
        page.goto(f"{address}?runs=p/one&tab=Compare")
        wait_for_text(page, "latest values", "9")
        header = page.get_by_test_id("latest values").get_by_role("columnheader").first
        header.press("Enter")
        cell = page.get_by_test_id("latest values").get_by_role("cell", name="train/loss")
        assert_keeps_text("latest values", cell, 10, "10")
        expect(header).to_have_attribute("aria-sort", "ascending")
        expect(header).to_be_focused()


def test_runs_samples_and_help_are_reached_by_keyboard(chromium: Browser, address: str) -> None:
    with visit(chromium, address) as page:
        wait_for_text(page, "runs", "p/one")
        page.get_by_role("checkbox", name="Select all runs on this page").press("Space")
        wait_for_text(page, "advice", "2 selected")
        color = "() => getComputedStyle(document.querySelector('[data-testid=runs] a')).color"
        for is_dark in (0, 1):
            wanted = [int(TEXTS["blue"][is_dark][place : place + 2], 16) for place in (1, 3, 5)]
            until_passes(lambda wanted=wanted: equal(page.evaluate(color), "rgb({}, {}, {})".format(*wanted)))
            page.get_by_test_id("dark").click()
        page.locator("body").click(position={"x": 1, "y": 1})
        page.keyboard.press("/")
        expect(page.get_by_test_id("filter")).to_be_focused()
        page.keyboard.type("one")
        expect(page.get_by_test_id("runs").locator("tbody tr")).to_have_count(2)  # with its evaluation
        page.get_by_test_id("runs").get_by_role("link", name="p/one").focus()
        outline = "() => getComputedStyle(document.activeElement).outlineStyle"
        page.keyboard.press("Enter")
        wait_for_text(page, "shown", "p/one")
        page.keyboard.press("]")
        wait_for_text(page, "shown", f"p/{LONG}")
        page.keyboard.press("[")
        wait_for_text(page, "shown", "p/one")
        page.keyboard.press(str(1 + TABS.index("Samples")))
        wait_for_text(page, "samples", "prompt 1")
        page.get_by_test_id("samples").focus()
        page.keyboard.press("ArrowDown")
        wait_for_text(page, "sample", "prompt 3")
        page.keyboard.press("ArrowDown")
        wait_for_text(page, "sample", "prompt 2")
        assert page.evaluate(outline) == "solid"
        page.keyboard.press("?")
        wait_for_text(page, "shortcuts", "Previous or next run")
        wait_for_text(page, "shortcuts", f"1 – {len(TABS)}")
        page.keyboard.press("Escape")
        expect(page.get_by_test_id("shortcuts")).to_be_hidden()


def test_tables_are_sorted_by_keyboard_with_missing_values_last(chromium: Browser, address: str) -> None:
    with visit(chromium, address) as page:
        wait_for_text(page, "runs", "p/one")
        header = page.get_by_role("columnheader", name="Best")
        rows = page.get_by_test_id("runs").locator("tbody tr")
        expect(header).not_to_have_attribute("aria-sort", re.compile("."))
        names = ["one", LONG]
        for order, listed in (("ascending", names), ("descending", names[::-1])):
            header.press("Enter")
            expect(header).to_have_attribute("aria-sort", order)
            for place, name in enumerate(listed):
                expect(rows.nth(place)).to_contain_text(f"p/{name} · dataset_")
            expect(rows.nth(2)).not_to_contain_text("dataset_")


def test_focus_is_visible_and_elements_have_names(chromium: Browser, address: str) -> None:
    with visit(chromium, address) as page:
        open_run(page, address, "one")
        for name in ("slider", "progressbar", "img"):
            labels = {"slider": "Smoothing", "progressbar": "Progress", "img": "Loss"}
            expect(page.get_by_role(name, name=labels[name])).to_be_visible()
        for title in ("Training monitor", "p/one", "Loss"):
            expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
        page.keyboard.press("Tab")
        for button in ("English", "Dark", "Keyboard shortcuts", "log"):
            page.locator("button, [role=switch]").filter(has_text=re.compile(button)).or_(
                page.get_by_role("button", name=button)
            ).first.focus()
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", button
        page.get_by_test_id("dark").click()
        for element in (page.get_by_test_id("log Loss"), page.get_by_test_id("help")):
            wanted = "rgb({}, {}, {})".format(*(int(TEXTS["blue"][1][place : place + 2], 16) for place in (1, 3, 5)))
            expect(element).to_have_css("color", wanted)
