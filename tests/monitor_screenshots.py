"""Makes the pictures of the monitor that the documents show.

    python -m tests.monitor_screenshots --root checkpoints [--run PATH] [--live PATH] [--output docs/images]

Writes `monitor_light.png` and `monitor_dark.png` of a run below the root, the one in English, the other in Chinese, and
with `--live PATH` also `monitor_live.png`, of a run that is under way.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from playwright.sync_api import Browser

from tests.monitor_browser import browser, monitor, wait_for_text

SIZE = {"width": 1280, "height": 900}


def main() -> None:
    """Start a monitor and a browser, and take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path("checkpoints"))
    parser.add_argument("--run", help="path of the run below the root; the monitor's first choice otherwise")
    parser.add_argument("--live", help="path of a run that is under way")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        with monitor(arguments.root.resolve(), Path(directory) / "monitor.sqlite") as address, browser() as running:
            for dark in (False, True):
                name = "monitor_dark.png" if dark else "monitor_light.png"
                take(running, address, arguments.run, dark, arguments.output / name)
            if arguments.live is not None:
                take(running, address, arguments.live, False, arguments.output / "monitor_live.png", "Live")


def take(running: Browser, address: str, run: str | None, dark: bool, path: Path, mode: str = "") -> None:
    """One picture, of a visitor who has not been there before; `mode` is waited for."""
    page = running.new_context(viewport=SIZE).new_page()
    page.goto(address)
    page.get_by_test_id("run").wait_for()
    if run is not None:
        page.get_by_test_id("run").click()
        page.get_by_role("option").filter(has_text=run).first.click()
        page.wait_for_timeout(1000)
    if dark:
        page.get_by_test_id("language").get_by_text("中文").click()
        page.wait_for_timeout(1000)
        page.get_by_test_id("dark").click()
    wait_for_text(page, "mode", mode)
    page.wait_for_timeout(2000)
    page.screenshot(path=path)
    page.context.close()


if __name__ == "__main__":
    main()
