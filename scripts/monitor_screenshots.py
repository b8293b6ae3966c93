"""Take the screenshots of the monitor that the documentation shows.

Writes `monitor_light.png` in English and `monitor_dark.png` in Chinese, and with `--live PATH` also
`monitor_live.png` of a run in progress. With `--tab TAB` it writes only `NAME.png`, of that tab.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from playwright.sync_api import Browser

from tests.helpers.monitor import browser, choose, monitor, open_tab, wait_for_text
from verl_ext.cli import CommandParser, clean_exit
from verl_ext.monitor.state import TABS

SIZE = {"width": 1280, "height": 900}


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
    parser.add_argument("--run", metavar="PATH", help="path of a run below the root (default: the newest)")
    parser.add_argument("--live", metavar="PATH", help="path of a run in progress")
    parser.add_argument("--tab", choices=TABS, help="take one screenshot, of this tab")
    parser.add_argument("--name", default="monitor", help="its file name without .png (default: %(default)s)")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("docs/images"), help="directory to write to")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        with monitor(arguments.root.resolve(), Path(directory) / "monitor.sqlite") as address, browser() as running:
            shoot = partial(take, running, address)
            if arguments.tab is not None:
                shoot(arguments.run, arguments.output / f"{arguments.name}.png", tab=arguments.tab)
                return
            shoot(arguments.run, arguments.output / "monitor_light.png")
            shoot(arguments.run, arguments.output / "monitor_dark.png", dark=True)
            if arguments.live is not None:
                shoot(arguments.live, arguments.output / "monitor_live.png", mode="Live")


def take(
    running: Browser, address: str, run: str | None, path: Path, *, tab: str = "", dark: bool = False, mode: str = ""
) -> None:
    """Take one screenshot as a new visitor, after the page shows this `mode`."""
    page = running.new_context(viewport=SIZE).new_page()
    page.goto(address)
    page.get_by_test_id("run").wait_for()
    if run is not None:
        choose(page, run)
    if dark:
        page.get_by_test_id("language").get_by_text("中文").click()
        page.wait_for_timeout(1000)
        page.get_by_test_id("dark").click()
    if tab:
        open_tab(page, tab)
    wait_for_text(page, "mode", mode)
    page.wait_for_timeout(2000)
    page.screenshot(path=path)
    page.context.close()


if __name__ == "__main__":
    main()
