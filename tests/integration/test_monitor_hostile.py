"""The monitor on a run with markup in every name and text: page and plots show the markup and do not run it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from playwright.sync_api import expect

from tests.helpers.monitor import (
    choose,
    monitor,
    open_tab,
    visit,
    wait_for_text,
    write_record,
    write_rows,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MARK = "<img src=x onerror=alert(1)>"
CLOSING = "</script><!--<script><svg onload=alert(2)>"
NAME = f"run {MARK}"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Metrics, samples, events, evaluations, a checkpoint and an error, all with names that are markup."""
    run_dir = tmp_path_factory.mktemp("hostile") / "checkpoints" / NAME
    write_record(run_dir, status="failed")
    record = json.loads((run_dir / "run.json").read_text())
    record["attempts"][0] |= {"exit_reason": f"why {MARK}", "end": "2026-01-01T00:05:00+00:00", "host": MARK}
    (run_dir / "run.json").write_text(json.dumps(record))
    rewards = {f"{MARK}_mean": 1.0, f"{CLOSING}_mean": 2.0, "reward_total_mean": 0.5}
    write_rows(run_dir, 1, range(1, 8), **rewards)
    key = {"step": 1, "attempt": 1, "sample_id": MARK, "number": 0}
    tokens = {**key, "texts": [CLOSING], "loss_mask": [1], "rollout_log_probs": [-1.0], "trainer_log_probs": [-2.0]}
    (run_dir / "sample_tokens.jsonl").write_text(json.dumps(tokens) + "\n")
    key["split"] = "train"
    samples = [{**key, "prompt": MARK, "answer": f"said {CLOSING}", MARK: 1.0, CLOSING: {"nested": MARK}}]
    (run_dir / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    event = {"time": 1e300, "step": 1, "level": "alarm", "name": MARK, "text": f"told {CLOSING}"}
    (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
    place = run_dir / "eval" / "eval_step_1"
    place.mkdir(parents=True)
    metrics = {"accepted_at_1": 0.5, "intervals": {"accepted_at_1": [0.1, 0.9]}, MARK: 1.0}
    for directory, kind in ((place, "success"), (run_dir / "eval" / f"eval_base_{MARK}", MARK)):
        answer = {"problem_id": MARK, "error_type": kind, "message": CLOSING, "prompt": MARK, "answer": CLOSING}
        for folder in ("verdicts", "answers"):
            (directory / folder).mkdir(parents=True)
            (directory / folder / f"set {MARK}.jsonl").write_text(json.dumps(answer) + "\n")
        (directory / "metrics.json").write_text(json.dumps({"step": 1, "datasets": {f"set {MARK}": metrics}}))
    checkpoint = run_dir / "global_step_1"
    checkpoint.mkdir()
    (checkpoint / "manifest.json").write_text(json.dumps({"files": {f"../{MARK}": {}}}))
    return run_dir


def test_page_shows_markup_as_text(chromium: Browser, run_dir: Path, tmp_path: Path) -> None:
    """`visit` checks that the page opens no dialog, raises no error and contacts no other machine."""
    with monitor(run_dir.parent, tmp_path / "monitor.sqlite") as address, visit(chromium, address) as page:
        choose(page, "run ")
        wait_for_text(page, "reason", f"why {MARK}")
        shown = {"Samples": ("samples", f"said {CLOSING}"[:20]), "Evaluation": ("dataset", f"set {MARK}")}
        shown |= {"Checkpoints": ("checkpoints", MARK), "Log": ("log", f"told {CLOSING}")}
        for tab, (element, words) in shown.items():
            open_tab(page, tab)
            wait_for_text(page, element, words)
        open_tab(page, "Evaluation")
        page.get_by_test_id("flips").get_by_role("link", name=MARK).click()
        wait_for_text(page, "flip", CLOSING)
        open_tab(page, "Log")
        page.get_by_test_id("search").fill("told")
        wait_for_text(page, "found", f"told {CLOSING}")
        open_tab(page, "Samples")
        page.get_by_test_id("samples").locator("tbody tr").first.click()
        wait_for_text(page, "sample", f"said {CLOSING}")
        wait_for_text(page, "sample", '"nested":"' + MARK)
        wait_for_text(page, "tokens", CLOSING)
        open_tab(page, "Compare")
        page.locator(".q-chip").filter(has_text=MARK).wait_for()
        page.get_by_test_id("compared metric").click()
        page.get_by_role("option").filter(has_text=CLOSING).click()
        page.keyboard.press("Escape")
        chart = page.locator('[data-testid="chart comparison train/loss"] canvas').first
        chart.wait_for()
        page.locator("canvas").nth(1).wait_for()  # of the metric whose name is markup
        chart.hover()
        tooltip = page.locator(".chart-tooltip")
        expect(tooltip.first).to_contain_text(NAME)
        assert re.fullmatch("[1-7]", tooltip.first.inner_text().split()[0]), "a step is an integer"
        open_tab(page, "Health")
        expect(tooltip).to_have_count(0)
        wait_for_text(page, "health", MARK)  # in the path of the run, which has no configuration
        page.get_by_test_id("home").click()
        wait_for_text(page, "runs", NAME)
        wait_for_text(page, "runs", MARK)  # the host
        page.goto(f"{address}?run={quote(CLOSING)}&search={quote(MARK)}&runs={quote(MARK)}&tab={quote(CLOSING)}")
        page.get_by_test_id("missing").wait_for()
        assert page.locator("img[src='x'], svg[onload]").count() == 0


def test_plotted_page_shows_markup_as_text_and_works_offline(chromium: Browser, run_dir: Path, tmp_path: Path) -> None:
    from verl_ext.monitor.__main__ import main

    assert main(["plot", str(run_dir), "--output", str(tmp_path)]) == 0
    context = chromium.new_context(offline=True)
    page, reports = context.new_page(), []
    page.on("dialog", lambda dialog: (reports.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: reports.append(str(error)))
    page.goto((tmp_path / "charts.html").as_uri())
    page.wait_for_selector("section:last-of-type canvas")
    assert page.locator("canvas").count() == len(list(tmp_path.glob("*.png")))
    charts = json.loads(page.evaluate("document.getElementById('charts').textContent"))
    assert [each["legend"]["data"] for each in charts] == [["train/loss"], ["train/reward_total_mean"]]
    assert page.locator("img[src='x'], svg[onload]").count() == 0
    context.close()
    assert reports == []
