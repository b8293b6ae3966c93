"""How fast the monitor reads a long run, and draws it.

The rows are those of a real run's training steps, with 17 metrics each. `ingest_s` is the time from the file to
database and curves; `parse_s`, for comparison, is the time of only parsing the lines as JSON. `draw_s` is the time from
opening the run in a restarted monitor to the points of the initially visible charts; `draw_all_s` includes all charts.
`first_charts_s` and `zoom_s` are measured in Chromium on a real server: from opening the run's page to its visible
charts, and from zooming to a tenth of the steps to its finer points. `click_s` is the time to the charts from a click
in the table of runs. `bare_page_s`, for comparison, is the time to open a page of NiceGUI with only a chart of two
points. Results are medians of `--rounds` runs, with their `ranges`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import orjson

from benchmarks.harness import bench_parser, columns, in_rounds, medians, ranges, spread, write_results
from tests.helpers.monitor import BROWSERS, answers, browser, monitor
from tests.helpers.processes import free_port, wait_until
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError
from verl_ext.monitor.charts import OTHER, charts_for
from verl_ext.monitor.database import MonitorDatabase
from verl_ext.monitor.follower import RunFollower

ROW = {
    **{"train/loss": 6.260452793394665, "train/lr(1e-3)": 0.05405405405405406, "train/grad_norm": 6.25535249710083},
    **{"train/perplexity": 523.4559038318014, "train/num_loss_tokens": 642.0, "train/epoch": 0.005333333333333333},
    **{
        "train/skipped_steps": 0,
        "system/peak_memory_gib": 1.054718017578125,
        "time/train/data_s": 0.0016479240002809092,
    },
    **{"time/train/forward_backward_s": 0.386758620999899, "time/train/optimizer_s": 0.15876874800051155},
    **{"time/train/step_s": 0.5467054460004874, "train/time(s)": 0.5455273690004105},
    **{"throughput/train/tokens_per_s": 2769.315745939451, "throughput/train/samples_per_s": 58.53243320347584},
    **{"val/num_loss_tokens": 4750.0, "throughput/train/mfu": 0.3812345678901234},
}


CHART = """() => {
  const box = document.querySelector('[data-testid="chart Loss"]');
  return box && getElement(parseInt(box.id.slice(1))).chart;
}"""
BARE_PAGE = """
import sys
from nicegui import ui

@ui.page("/")
def home():
    ui.label("home")

@ui.page("/chart")
def chart():
    series = [{"type": "line", "data": [[0, 1], [1, 2]]}]
    ui.echart({"xAxis": {}, "yAxis": {}, "series": series}).props["data-testid"] = "chart Loss"

ui.run(host="127.0.0.1", port=int(sys.argv[1]), show=False, reload=False)
"""
NUM_POINTS = f"() => {{ const chart = ({CHART})(); return chart ? chart.getOption().series.at(-1).data.length : 0; }}"
FIRST_STEP = f"() => ({CHART})().getOption().series.at(-1).data[0][0]"
ZOOM = f"ends => ({CHART})().dispatchAction({{type: 'dataZoom', startValue: ends[0], endValue: ends[1]}})"


def write_run(run_dir: Path, rows: int) -> None:
    """Write a run whose loss differs from row to row."""
    run_dir.mkdir(parents=True)
    attempt = {"attempt": 1, "start": "2026-01-01T00:00:00+00:00", "end": None, "first_step": 0}
    run = {"status": "running", "project": "p", "experiment": "e", "stage": "sft", "total_steps": rows}
    (run_dir / "run.json").write_text(json.dumps({**run, "attempts": [attempt]}))
    with open(run_dir / "metrics.jsonl", "wb") as file:
        for step in range(1, rows + 1):
            row = {"step": step, "attempt": 1, "time": step / 10, **ROW, "train/loss": 1 + step % 1013 / 1013}
            file.write(orjson.dumps(row) + b"\n")


def measure(rows: int, in_browser: bool) -> dict[str, float]:
    """Seconds of each part, and sizes."""
    with tempfile.TemporaryDirectory(prefix="benchmark_monitor_") as directory:
        root, database = Path(directory, "checkpoints"), Path(directory, "monitor.sqlite")
        metrics = root / "p/e/metrics.jsonl"
        write_run(metrics.parent, rows)
        begun = time.perf_counter()
        with open(metrics, "rb") as file:
            for line in file:
                orjson.loads(line)
        parsed = time.perf_counter()
        follower = RunFollower(database, root)
        [run] = follower.find_runs()
        while follower.read_new_rows(run):
            pass
        follower.stop()
        read = time.perf_counter()
        curves = MonitorDatabase(database).load_curves(run)
        charts = charts_for(curves.envelopes)
        for metric in (name for chart in charts if chart.place != OTHER for name in chart.metrics):
            curves.envelopes[metric].points()
        drawn = time.perf_counter()
        for metric in (name for chart in charts for name in chart.metrics):
            curves.envelopes[metric].points()
        all_drawn = time.perf_counter()
        follower.reader.close()
        return {
            **(measure_in_browser(root, database, rows) if in_browser else {}),
            "parse_s": parsed - begun,
            "ingest_s": read - parsed,
            "draw_s": drawn - read,
            "draw_all_s": all_drawn - read,
            "database_mb": database.stat().st_size / 1e6,
            "file_mb": metrics.stat().st_size / 1e6,
        }


def measure_in_browser(root: Path, database: Path, rows: int) -> dict[str, float]:
    """Seconds until a visitor sees the first charts, and finer points after zooming."""
    with monitor(root, database) as address, browser() as running:
        page = running.new_page()
        page.goto(address)  # imports of the server, and the browser's cache of scripts
        page.get_by_test_id("runs").get_by_text("p/e").wait_for()
        begun = time.perf_counter()
        page.goto(f"{address}?{urlencode({'run': 'p/e'})}")
        page.wait_for_function(f"() => ({NUM_POINTS})() > 0")
        drawn = time.perf_counter()
        page.evaluate(ZOOM, [rows * 0.5, rows * 0.6])
        page.wait_for_function(f"() => ({FIRST_STEP})() > {rows * 0.4}")
        zoomed = time.perf_counter()
        page.get_by_test_id("home").click()
        link = page.get_by_test_id("runs").get_by_role("link", name="p/e")
        link.wait_for()
        clicked = time.perf_counter()
        link.click()
        page.wait_for_function(f"() => ({NUM_POINTS})() > 0")
        click_s = time.perf_counter() - clicked
    times = {"first_charts_s": drawn - begun, "zoom_s": zoomed - drawn, "click_s": click_s}
    return {**times, "bare_page_s": measure_bare_page()}


def measure_bare_page() -> float:
    """Seconds from opening `BARE_PAGE` to its chart, with the browser's cache of scripts."""
    port = free_port()
    # the variable makes NiceGUI believe that it is being tested
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    words = [sys.executable, "-c", BARE_PAGE, str(port)]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}/"
    try:
        wait_until(lambda: answers(address), process, pause_s=0.1)
        with browser() as running:
            page = running.new_page()
            page.goto(address)
            page.get_by_text("home").wait_for()
            begun = time.perf_counter()
            page.goto(f"{address}chart")
            page.wait_for_function(f"() => ({NUM_POINTS})() > 0")
            return time.perf_counter() - begun
    finally:
        process.terminate()
        process.wait()


@clean_exit()
def main() -> int:
    """Measure, print and write."""
    parser = bench_parser("monitor", __doc__, "", "--rows 100000 --output FILE.json")
    parser.add_argument("--rows", type=IntArg(), default=1_000_000, help="rows of the run")
    parser.add_argument("--rounds", type=IntArg(), default=3, help="number of times to read and draw it")
    parser.add_argument("--no-browser", action="store_true", help="skip the measurements in Chromium")
    arguments = parser.parse_args()
    if not arguments.no_browser and not any(map(shutil.which, BROWSERS)):
        raise UserError("no Chromium is installed; run `bash tests/run.sh --install` as root, or add --no-browser")
    print_line(f"reading {arguments.rows} rows, about {arguments.rows / 50_000:.0f} s per round", sys.stderr)
    work = partial(measure, arguments.rows, not arguments.no_browser)
    rounds = in_rounds({"monitor": work}, arguments.rounds, "measuring")["monitor"]
    for name, values in columns(rounds).items():
        print_line(f"{name:<12} {spread(values)}")
    write_results({"rows": arguments.rows, **medians(rounds), "ranges": ranges(rounds)}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
