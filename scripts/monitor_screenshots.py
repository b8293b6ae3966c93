"""Take the screenshots of the monitor that the documentation shows.

Writes `monitor_runs.png` (the table of runs), `monitor_light.png` (a run in English), `monitor_dark.png` (the run in
Chinese) and, with `--live PATH`, `monitor_live.png` (a run in progress). With `--tab TAB`, writes only `NAME.png` (that
tab).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, Page

from tests.helpers.monitor import browser, monitor, wait_for_text
from verl_ext.cli import CommandParser, clean_exit
from verl_ext.monitor.state import TABS

WIDTH, HEIGHT = 1280, 1090
TABLE_HEIGHT, FOLDED_HEIGHT = 340, 740
"""Heights of the screenshots of the table, and of a run with folded charts."""


@clean_exit()
def main() -> None:
    """Start a monitor and a browser, and take the screenshots."""
    parser = CommandParser(
        prog="python -m scripts.monitor_screenshots",
        description=__doc__ or "",
        examples=[
            "python -m scripts.monitor_screenshots --run rlvr_coding_model/sft_quickstart",
            "python -m scripts.monitor_screenshots --run rlvr_coding_model/sft_quickstart --tab Health --name health",
        ],
    )
    directory = Path("checkpoints")
    parser.add_argument("--root", type=Path, metavar="DIR", default=directory, help="directory that contains the runs")
    parser.add_argument("--run", metavar="PATH", required=True, help="path of a run below the root")
    parser.add_argument("--live", metavar="PATH", help="path of a run in progress")
    parser.add_argument("--tab", choices=TABS, help="take one screenshot, of this tab")
    parser.add_argument("--name", default="monitor", help="its file name without .png (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("docs/images"), help="directory to write to")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        with monitor(arguments.root.resolve(), Path(directory) / "monitor.sqlite") as address, browser() as running:
            if arguments.tab is not None:
                page = visit_run(running, address, run=arguments.run, tab=arguments.tab)
                save(page, arguments.output / f"{arguments.name}.png")
                return
            page = visit_run(running, address)
            wait_for_text(page, "runs", arguments.run)
            page.set_viewport_size({"width": WIDTH, "height": TABLE_HEIGHT})
            save(page, arguments.output / "monitor_runs.png")
            page = visit_run(running, address, run=arguments.run)
            page.get_by_test_id("fold").locator(".q-item").click()
            save(page, arguments.output / "monitor_light.png")
            page = visit_run(running, address, run=arguments.run)
            page.get_by_test_id("fold").locator(".q-item").click()
            page.get_by_test_id("language").get_by_text("中文").click()
            page.get_by_text("训练监控").wait_for()
            page.get_by_test_id("dark").click()
            page.locator("body.body--dark").wait_for()
            save(page, arguments.output / "monitor_dark.png")
            if arguments.live is not None:
                page = visit_run(running, address, run=arguments.live)
                wait_for_text(page, "mode", "Live")
                page.set_viewport_size({"width": WIDTH, "height": FOLDED_HEIGHT})
                save(page, arguments.output / "monitor_live.png")


def visit_run(running: Browser, address: str, **state: str) -> Page:
    """Open the page in a new browser context, with the state in its address."""
    page = running.new_context(viewport={"width": WIDTH, "height": HEIGHT}).new_page()
    page.goto(f"{address}?{urlencode(state)}")
    page.get_by_test_id("shown" if state else "runs").wait_for()
    return page


def save(page: Page, path: Path) -> None:
    """Take the screenshot after everything is drawn."""
    page.mouse.move(0, 300)  # away from the controls, whose tooltips would cover others
    page.wait_for_timeout(2500)
    page.screenshot(path=path)
    page.context.close()


if __name__ == "__main__":
    main()
