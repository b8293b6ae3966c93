"""The monitor on real runs: a real server and a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.helpers.commands import NUM_STEPS, Hold, SFTRun
from tests.helpers.monitor import (
    choose,
    copy_run,
    monitor,
    open_tab,
    series,
    text,
    until_passes,
    visit,
    wait_for_text,
)
from verl_ext.metrics.jsonl import read_metrics

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, WebSocketRoute

ON_THE_PAGE = ["Loss", "Perplexity"]
IN_THE_FOLD = [
    *("Gradient norm", "Learning rate and its schedule", "Evaluation loss", "Training speed", "Token throughput"),
    *("Step time", "Time by part", "Memory and disk"),
]
LOSS_CHART = """getElement(document.querySelector('[data-testid="chart Loss"]').id.slice(1)).chart"""
ZOOM = f"ends => {LOSS_CHART}.dispatchAction({{type: 'dataZoom', startValue: ends[0], endValue: ends[1]}})"
WINDOW = f"() => (({{startValue, endValue}}) => [startValue, endValue])({LOSS_CHART}.getOption().dataZoom[0])"


@pytest.fixture(scope="module")
def root(quickstart: Path, sft_run: SFTRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`restarted`, which finished and was then extended from step 4 to step 8, and `failed` with another rate."""
    root = tmp_path_factory.mktemp("monitored") / "checkpoints"
    run_dir = copy_run(sft_run.run_dir, root / "project/restarted", 4, NUM_STEPS)
    again = (f"trainer.resume_from_path={run_dir}/global_step_4", "trainer.resume_mode=resume_path")
    extended = (f"trainer.total_training_steps={NUM_STEPS + 2}", "trainer.test_freq=2", "trainer.val_before_train=true")
    SFTRun(quickstart, run_dir, *again, *extended).finish()
    failed = SFTRun(quickstart, root / "project/failed", "optim.lr=1e30", "optim.lr_warmup_steps_ratio=0.0")
    assert failed.start().returncode == 2
    return root


@pytest.fixture(scope="module")
def address(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with monitor(root, tmp_path_factory.mktemp("database") / "monitor.sqlite") as address:
        yield address


@pytest.fixture
def page(chromium: Browser, address: str) -> Iterator[Page]:
    with visit(chromium, address) as page:
        yield page


def test_charts_show_every_value_and_separate_restarts(page: Page, root: Path) -> None:
    choose(page, "restarted")
    page.get_by_test_id("fold").get_by_text("Other charts").click()
    rows = read_metrics(root / "project/restarted/metrics.jsonl")

    def assert_values(chart: str) -> None:
        for line in series(page, chart):
            values = [row[line["name"]] for row in rows if line["name"] in row]
            if not values:  # the schedule
                assert chart == "Learning rate and its schedule" and len(line["data"]) == NUM_STEPS + 2
                continue
            scale = 1e-3 if line["name"] == "train/lr(1e-3)" else 1
            assert [value for _, value in line["data"]] == pytest.approx([value * scale for value in values], rel=1e-5)

    for chart in [*ON_THE_PAGE, *IN_THE_FOLD]:
        until_passes(lambda chart=chart: assert_values(chart))
    loss, validation = series(page, "Loss")
    assert [place for place, _ in validation["data"]] == [0, 2, 4, 6, 8, 10]
    assert [place for place, _ in loss["data"]] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]  # steps 1 to 6, then 5 to 8
    assert loss["marks"] == [NUM_STEPS]
    assert text(page, "value Current step") == "8" and text(page, "status") == "finished"
    assert text(page, "mode") == "History" and text(page, "value Progress") == "100.0%"


def test_wheel_zooms_and_double_click_resets(page: Page, address: str) -> None:
    page.goto(f"{address}?run=project%2Frestarted&smoothing=0&axis=time")
    whole = loss_places(page)
    assert whole == sorted(whole) and whole[0] >= 0 and len(whole) == 10
    chart = page.get_by_test_id("chart Loss")
    page.get_by_test_id("axis").click()
    page.get_by_role("option", name="step", exact=True).click()
    until_passes(lambda: assert_steps(page, range(1, 11)))
    chart.hover()
    page.keyboard.down("Control")
    for _ in range(8):
        page.mouse.wheel(0, -240)
    page.keyboard.up("Control")
    until_passes(lambda: assert_steps(page, range(2, 10)))  # the window and its neighbors
    chart.dblclick()
    until_passes(lambda: assert_steps(page, range(1, 11)))


def test_late_points_leave_the_visible_part_as_it_is(page: Page, address: str) -> None:
    """The points of a first zoom arrive after a second one."""
    late: list[str | bytes] | None = None

    def connect(socket: WebSocketRoute) -> None:
        server = socket.connect_to_server()
        server.on_message(lambda message: socket.send(message) if late is None else late.append(message))
        socket.on_message(server.send)
        sockets.append(socket)

    sockets: list[WebSocketRoute] = []
    page.route_web_socket(re.compile("/socket.io/"), connect)
    page.goto(f"{address}?run=project%2Frestarted&smoothing=0")
    until_passes(lambda: assert_steps(page, range(1, 11)))
    page.wait_for_function("() => window.socket?.connected")
    late = []
    page.evaluate(ZOOM, [3, 8])

    def assert_answered() -> None:
        assert page.evaluate(WINDOW) == [3, 8] and any("startValue" in str(message) for message in late or ())

    until_passes(assert_answered)
    page.evaluate(ZOOM, [5, 6])
    for message in late:
        sockets[-1].send(message)
    until_passes(lambda: assert_steps(page, range(2, 10)))
    assert page.evaluate(WINDOW) == [5, 6]


def test_table_of_runs_loads_library_of_charts(page: Page) -> None:
    wait_for_text(page, "runs", "project/restarted")
    page.wait_for_function("""() => {
      const modules = JSON.parse(document.querySelector('script[type="importmap"]').textContent).imports;
      return performance.getEntriesByType('resource').some(each => each.name.endsWith(modules['nicegui-echart']));
    }""")


def loss_places(page: Page) -> list[float]:
    """Positions of the losses on the x-axis."""
    return [place for place, _ in loss_lines(page)[0]["data"]]


def assert_steps(page: Page, within: range) -> None:
    """Assert that the loss is drawn within these steps; all of them if these are all."""
    places = loss_places(page)
    assert places and {*places} <= {*within} and (len(within) < 10 or places == [*within])


def test_failed_run_is_red_with_its_reason(page: Page) -> None:
    choose(page, "project/failed")
    wait_for_text(page, "status", "failed")
    color = page.get_by_test_id("status").evaluate("box => getComputedStyle(box).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", color)[:3])
    assert red > 180 and green < 100 and blue < 100
    assert "not finite" in text(page, "reason")


def test_live_run_updates_open_page(page: Page, root: Path, quickstart: Path, tmp_path: Path) -> None:
    """The run appears in an open page, which shows its steps without a reload; then its loss is smoothed."""
    run = SFTRun(quickstart, root / "project/live", "trainer.total_training_steps=40", "trainer.save_freq=-1")
    with run.held(Hold("verl_ext.trainer.sft", "SFTTrainer.training_step", call=11), tmp_path) as held:
        choose(page, "project/live")  # it appears in the open list
        wait_for_text(page, "mode", "Live")
        wait_for_text(page, "value Current step", "10")
        until_passes(lambda: assert_losses(page, run, 10))
        assert held.release().returncode == 0
    wait_for_text(page, "value Current step", "40")
    wait_for_text(page, "mode", "History")
    until_passes(lambda: assert_losses(page, run, 40))
    smoothed, raw = loss_lines(page)
    assert len(smoothed["data"]) == 40 and smoothed["data"] != raw["data"]
    slider = page.get_by_test_id("smoothing")
    box = slider.bounding_box()
    assert box is not None

    def assert_not_smoothed() -> None:
        [alone] = loss_lines(page)
        assert alone["data"] == raw["data"]

    def assert_smoother() -> None:
        smoother, behind = loss_lines(page)
        lines = (smoother, smoothed, behind)
        spreads = [max(y for _, y in line["data"]) - min(y for _, y in line["data"]) for line in lines]
        assert behind["data"] == raw["data"] and spreads[0] < spreads[1] < spreads[2]

    slider.click(position={"x": 1, "y": box["height"] / 2})
    until_passes(assert_not_smoothed)
    slider.click(position={"x": box["width"] - 1, "y": box["height"] / 2})
    until_passes(assert_smoother)


def loss_lines(page: Page) -> list[dict[str, Any]]:
    """The lines of the training loss."""
    return [line for line in series(page, "Loss") if line["name"] == "train/loss"]


def assert_losses(page: Page, run: SFTRun, num_steps: int) -> None:
    """Assert that the last line of the chart has the run's unsmoothed losses so far."""
    losses = list(run.losses().values())
    assert [value for _, value in loss_lines(page)[-1]["data"]] == pytest.approx(losses, rel=1e-5)
    assert len(losses) == num_steps


def test_log_can_be_searched(page: Page) -> None:
    choose(page, "restarted")
    open_tab(page, "Log")
    wait_for_text(page, "log", "attempt 2 began at step 4")
    page.get_by_test_id("search").fill("val/loss")
    wait_for_text(page, "found", "val/loss")
    assert "attempt 2 began" not in text(page, "found")
    page.get_by_test_id("search").fill("VAL LOSS")
    page.get_by_test_id("log source").get_by_text("Console").click()
    wait_for_text(page, "found", f"rank 0: step {NUM_STEPS}/{NUM_STEPS} | val loss")
    page.get_by_test_id("search").fill("")
    wait_for_text(page, "log", "launcher: Starting")


def test_reload_keeps_language_dark_mode_and_tab(page: Page) -> None:
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
    assert page.evaluate("() => document.documentElement.lang") == "zh"


def test_health_tab_shows_findings(page: Page) -> None:
    choose(page, "restarted")
    open_tab(page, "Health")
    wait_for_text(page, "health", "loss_not_finite")
    assert "At every checkpoint" in text(page, "health")


def test_metrics_can_be_downloaded_as_csv(page: Page, root: Path) -> None:
    choose(page, "restarted")
    with page.expect_download() as download:
        page.get_by_test_id("csv").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 1 + len(read_metrics(root / "project/restarted/metrics.jsonl"))
    assert lines[0].startswith("step,attempt,time,")


def test_runs_can_be_filtered_and_compared(page: Page) -> None:
    table = page.get_by_test_id("runs")
    wait_for_text(page, "runs", "project/restarted")
    row = table.locator("tr").filter(has_text="project/restarted")
    cells = [cell.strip() for cell in row.inner_text().split("\t") if cell.strip()]
    assert cells[:2] == ["finished", "project/restarted"]
    page.get_by_test_id("filter").fill("failed")
    expect(row).to_have_count(0)
    page.get_by_test_id("filter").fill("project/")
    for name in ("project/restarted", "project/failed"):
        table.locator("tr").filter(has_text=name).get_by_role("checkbox").click()
    page.get_by_test_id("compare").click()
    expect(page).to_have_url(re.compile(r"\?tab=Compare&runs=project%2Frestarted&runs=project%2Ffailed$"))
    wait_for_text(page, "differences", "optim.lr")

    def assert_both() -> None:
        assert {line["name"] for line in series(page, "comparison train/loss")} == {"restarted", "failed"}

    until_passes(assert_both)
    page.go_back()
    table.get_by_role("link", name="project/failed").click()
    wait_for_text(page, "shown", "project/failed")


def test_back_reload_and_links_restore_state_from_url(page: Page, address: str) -> None:
    choose(page, "project/restarted")
    open_tab(page, "Log")
    wait_for_text(page, "log", "attempt 2 began at step 4")
    expect(page).to_have_url(f"{address}?run=project%2Frestarted&tab=Log")
    open_tab(page, "Checkpoints")
    wait_for_text(page, "checkpoints", "global_step_8")
    page.go_back()
    wait_for_text(page, "log", "attempt 2 began at step 4")
    page.go_back()
    page.get_by_test_id("chart Loss").wait_for()
    page.get_by_test_id("home").click()
    page.get_by_test_id("runs").wait_for()
    expect(page).to_have_url(address)
    page.go_back()
    wait_for_text(page, "shown", "project/restarted")
    page.goto(f"{address}?run=project/restarted&smoothing=0")
    [loss] = loss_lines(page)
    assert len(loss["data"]) == 10
    page.goto(f"{address}?run=project/gone")
    wait_for_text(page, "missing", "does not exist")
    page.get_by_test_id("runs").wait_for()


def test_chart_hints_exist_in_both_languages(page: Page) -> None:
    choose(page, "project/restarted")
    page.get_by_test_id("hint Loss").hover()
    page.get_by_text("It should fall quickly at first").wait_for()
    page.get_by_test_id("language").get_by_text("中文").click()
    page.get_by_text("损失曲线").wait_for()
    page.get_by_test_id("hint Loss").hover()
    page.get_by_text("理想趋势：初期快速下降").wait_for()


def test_other_machines_need_token(chromium: Browser, root: Path, tmp_path: Path) -> None:
    with monitor(root, tmp_path / "monitor.sqlite", "--token", "secret", host="127.0.0.2") as address:
        page = chromium.new_page()
        assert page.goto(address).status == 403
        assert page.goto(f"{address}?token=wrong").status == 403
        assert page.goto(f"{address}?token=secret").status == 200
        page.get_by_test_id("run").wait_for()
        assert page.goto(f"{address}?run=project/restarted").status == 200  # by the cookie
        page.get_by_test_id("value Current step").wait_for()  # over the web socket
        page.close()


def test_two_monitors_of_one_host_keep_visitors_and_preferences(chromium: Browser, tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = ((tmp_path / name, tmp_path / f"{name}.sqlite", "--token", name) for name in ("one", "other"))
    with monitor(*one) as first, monitor(*other) as second:
        page = chromium.new_page()
        page.goto(f"{first}?token=one")
        page.get_by_test_id("language").get_by_text("中文").click()
        page.wait_for_function("() => document.body.innerText.includes('训练监控')")
        assert page.goto(f"{second}?token=other").status == 200
        wait_for_text(page, "empty", "No run yet")
        assert page.goto(first).status == 200
        wait_for_text(page, "empty", "还没有任务")
        page.close()


def test_empty_root_is_reported(chromium: Browser, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with monitor(tmp_path / "checkpoints", tmp_path / "monitor.sqlite") as address:
        page = chromium.new_page()
        page.goto(address)
        wait_for_text(page, "empty", "No run yet")
        page.close()


def test_plot_writes_every_chart(root: Path, tmp_path: Path) -> None:
    """`test_monitor_hostile` covers the page in a browser."""
    from verl_ext.monitor.__main__ import main

    assert main(["plot", str(root / "project/restarted"), "--output", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {re.sub(r"[^a-z0-9]+", "_", name.lower()) + ".png" for name in [*ON_THE_PAGE, *IN_THE_FOLD]}
    [charts] = re.findall(r'<script id="charts"[^>]*>(.*?)</script>', (tmp_path / "charts.html").read_text(), re.DOTALL)
    options = json.loads(charts)
    assert len(options) == len(names) and options[0]["series"][0]["data"][-1][0] == 10
