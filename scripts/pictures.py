"""Make the pictures of the documentation from the runs of the quickstart and of the walkthrough.

Starts the monitor and headless Chromium, and writes a PNG file for each view. Without --names, it makes all pictures
except that of a run in progress. Needs the Debian packages chromium, fonts-noto-cjk and fonts-noto-color-emoji.
"""

from __future__ import annotations

import html
import os
import pty
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser

from tests.helpers import ROOT
from tests.helpers.monitor import browser, monitor, wait_for_text
from verl_ext.cli import CommandParser, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError

WIDTH, HEIGHT = 1280, 1090
PROJECT = "rlvr_coding_model"
QUICKSTART, SFT, GRPO, CONTROLLER = (
    f"{PROJECT}/{name}"
    for name in ("sft_quickstart", "sft_smollm2_135m", "grpo_smollm2_reasoning", "controller_quickstart")
)
CHAT = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris"},
    {"role": "user", "content": "And of Italy?"},
    {"role": "assistant", "content": "Rome"},
]
GREEN, PLAIN = "\x1b[1;32m", "\x1b[0m"
TERMINAL = """<body style="margin: 0; background: #fff"><pre style="display: inline-block; margin: 0;
padding: 16px 24px; background: #16181d; color: #c8ccd4; font: 16px/1.5 monospace">{}</pre></body>"""


@dataclass(frozen=True)
class MonitorView:
    """A picture of the monitor.

    Attributes:
        address: state of the page in its address; empty for the table of runs.
        height: in pixels.
        is_dark: whether to switch to the dark mode.
    """

    address: Mapping[str, str]
    height: int = HEIGHT
    is_dark: bool = False


VIEWS = {
    "monitor_runs": MonitorView({}, height=620),
    "monitor_light": MonitorView({"run": QUICKSTART}),
    "monitor_dark": MonitorView({"run": SFT, "tab": "Checkpoints"}, height=560, is_dark=True),
    "monitor_live": MonitorView({"run": GRPO}, height=740),
    "health_findings": MonitorView({"run": SFT, "tab": "Health"}, height=900),
    "walkthrough_sft": MonitorView({"run": SFT}, height=720),
    "walkthrough_evaluation": MonitorView({"run": SFT, "tab": "Evaluation"}, height=760),
    "grpo_training": MonitorView({"run": GRPO}),
    "grpo_samples": MonitorView({"run": GRPO, "tab": "Samples"}, height=760),
    "walkthrough_controller": MonitorView({"run": CONTROLLER}),
}
LIVE = "monitor_live"
PLOTS = {
    "walkthrough_rates": f"{SFT}/eval/report/rates_over_steps.png",
    "controller_pareto": f"{CONTROLLER}/eval/adaptive_step_112/pareto.png",
}
"""Pictures that the evaluation itself makes, by their path below the root."""
MASK = "chat_mask"
NAMES = (*VIEWS, *PLOTS, MASK)


@clean_exit()
def main() -> None:
    """Make the pictures."""
    parser = CommandParser(
        prog="python -m scripts.pictures",
        description=__doc__ or "",
        examples=["python -m scripts.pictures", "python -m scripts.pictures --names monitor_live grpo_training"],
    )
    parser.add_argument(
        "--root", type=Path, metavar="DIR", default=Path("checkpoints"), help="directory that contains the runs"
    )
    parser.add_argument("--names", nargs="+", choices=NAMES, metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("docs/images"), help="directory to write to")
    arguments = parser.parse_args()
    names = arguments.names or [name for name in NAMES if name != LIVE]
    arguments.output.mkdir(parents=True, exist_ok=True)
    with open_monitor(arguments.root.resolve()) as address, browser() as running:
        for name in names:
            path = arguments.output / f"{name}.png"
            if name in PLOTS:
                shutil.copyfile(arguments.root / PLOTS[name], path)
            elif name == MASK:
                show_chat_mask(running, path)
            else:
                show_monitor(running, address, VIEWS[name], path, is_live=name == LIVE)
            print_line(f"wrote {path}")


@contextmanager
def open_monitor(root: Path) -> Iterator[str]:
    """A monitor of the runs with a database of its own; its address."""
    with tempfile.TemporaryDirectory() as directory, monitor(root, Path(directory) / "monitor.sqlite") as address:
        yield address


def show_monitor(running: Browser, address: str, view: MonitorView, path: Path, is_live: bool) -> None:
    """Take a picture of a page as a new visitor sees it, when everything has been drawn."""
    page = running.new_context(viewport={"width": WIDTH, "height": view.height}).new_page()
    page.goto(f"{address}?{urlencode(view.address)}")
    page.get_by_test_id("shown" if view.address else "runs").wait_for()
    if view.is_dark:
        page.get_by_test_id("dark").click()
    if not view.address:
        wait_for_text(page, "runs", SFT)
    elif "tab" not in view.address and view.address["run"] == QUICKSTART:
        page.get_by_test_id("fold").locator(".q-item").click()
    if view.address.get("tab") == "Samples":
        page.locator("tbody tr").first.click()
    if is_live:
        wait_for_text(page, "mode", "Live")
    page.mouse.move(0, 300)  # off the controls, whose hints would cover others
    page.wait_for_timeout(2500)
    page.screenshot(path=path)
    page.context.close()


def show_chat_mask(running: Browser, path: Path) -> None:
    """Take a picture of what `--show-samples` prints on a terminal for a chat of several turns.

    Raises:
        UserError: the command fails.
    """
    import pandas as pd

    with tempfile.TemporaryDirectory() as directory:
        chats = Path(directory) / "chats.parquet"
        pd.DataFrame({"messages": [CHAT]}).to_parquet(chats)
        words = ["recipe=smollm2_135m", f"data.train_files={chats}", "data.val_files=null", "--show-samples", "1"]
        output = run_on_terminal(["bash", "run_sft.sh", *words])
    sample = output[output.index("--- sample") :].strip()
    colored = html.escape(sample).replace(GREEN, '<b style="color: #6fd38a">').replace(PLAIN, "</b>")
    page = running.new_context(viewport={"width": 720, "height": 400}).new_page()
    page.set_content(TERMINAL.format(colored))
    page.locator("pre").screenshot(path=path)
    page.context.close()


def run_on_terminal(command: list[str]) -> str:
    """What a command prints to a terminal.

    Raises:
        UserError: it fails.
    """
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdout=follower, stderr=follower)
    os.close(follower)
    parts = []
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux's end of a terminal's output
            break
        parts.append(part)
    os.close(leader)
    output = b"".join(parts).decode().replace("\r\n", "\n")
    if process.wait():
        raise UserError(f"`{' '.join(command)}` failed: {output}")
    return output


if __name__ == "__main__":
    main()
