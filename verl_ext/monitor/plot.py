"""The charts without a server: PNG files, and one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import RUN_FILE
from verl_ext.monitor.charts import (
    COLORS,
    FAINT,
    GREY,
    RED,
    Chart,
    ChartStyle,
    chart_options,
    charts_for,
    schedule_points,
)
from verl_ext.monitor.curves import RunCurves, is_worth_smoothing, smooth
from verl_ext.monitor.database import RunInfo
from verl_ext.monitor.follower import RunFollower, read_config

PAGE_FILE = "charts.html"
SIZE_INCHES = (8.0, 4.5)
DOTS_PER_INCH = 120
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 1em; color: #374151 }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1.5em 1em }}
h2 {{ font-size: 1em; margin: 0 0 .2em }}
section p {{ font-size: .8em; margin: 0 0 .3em; color: #6b7280 }}
section div {{ height: 300px }}
</style></head><body>
<h1>{title}</h1><p>{status}</p><main>{sections}</main>
<script id="charts" type="application/json">{options}</script>
<script id="library" type="text/plain">{library}</script>
<script type="module">
const text = document.getElementById("library").textContent;
const library = await import(URL.createObjectURL(new Blob([text], {{type: "text/javascript"}})));
const options = JSON.parse(document.getElementById("charts").textContent);
document.querySelectorAll("section div").forEach((box, place) => {{
  const chart = library.{name}.init(box);
  chart.setOption(options[place]);
  addEventListener("resize", () => chart.resize());
}});
</script></body></html>
"""
SECTION = "<section><h2>{title}</h2><p>{hint}</p><div></div></section>"


def plot_run(run_dir: Path, output: Path, smoothing: float) -> list[Path]:
    """Write every chart of a run as PNG, and one page with all of them; returns the PNG files.

    Raises:
        UserError: this is not the directory of a run that has begun.
        OSError: a file cannot be written.
    """
    with read_run(run_dir) as (run, curves):
        schedule = schedule_points(read_config(run_dir), run.total_steps, curves)
        charts = charts_for(curves.envelopes)
        output.mkdir(parents=True, exist_ok=True)
        paths = [_write_png(run, curves, chart, schedule, output, smoothing) for chart in charts]
        _write_page(run, curves, charts, schedule, output / PAGE_FILE, smoothing)
    return paths


@contextmanager
def read_run(run_dir: Path) -> Iterator[tuple[RunInfo, RunCurves]]:
    """One run, read into a temporary database."""
    for name in (RUN_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}, so it is not a run that has begun; give a run directory")
    directory = run_dir.resolve()
    with tempfile.TemporaryDirectory(prefix="verl_ext_plot_") as temporary:
        follower = RunFollower(Path(temporary) / "plot.sqlite", directory.parent)
        try:
            run = follower.read_one(directory)
            yield run, follower.curves(run)
        finally:
            follower.stop()


# PNG files


def _write_png(
    run: RunInfo,
    curves: RunCurves,
    chart: Chart,
    schedule: Sequence[tuple[int, float]],
    directory: Path,
    smoothing: float,
) -> Path:
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    for metric, color in zip(chart.metrics, COLORS):
        _draw_curve(axes, curves, chart, metric, color, smoothing)
    if chart.with_schedule and schedule:
        axes.plot(*zip(*schedule), color=GREY, ls="--", lw=1, label="schedule")
    for attempt, place in [*curves.starts.items()][1:]:
        axes.axvline(place, color=GREY, ls=":", lw=1)
        axes.annotate(f"attempt {attempt}", (place, 1), xycoords=("data", "axes fraction"), fontsize=8, color=GREY)
    if chart.line is not None:
        axes.axhline(chart.line, color=RED, lw=1)
    # not a formula: a path may have dollar signs
    axes.set_title(f"{chart.name} · {run.path}", parse_math=False)
    axes.set_xlabel("steps over all attempts")
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
    path = directory / f"{re.sub(r'[^a-z0-9]+', '_', chart.name.lower())}.png"
    figure.savefig(path)
    return path


def _draw_curve(axes: Axes, curves: RunCurves, chart: Chart, metric: str, color: str, smoothing: float) -> None:
    """The curve; or the smoothed one, and behind it the faint curve."""
    x, values = curves.envelopes[metric].points()
    if chart.with_schedule or not is_worth_smoothing(len(values), smoothing):
        axes.plot(x, values * chart.scale, color=color, lw=1, label=metric)
        return
    axes.plot(x, values * chart.scale, color=color, alpha=FAINT, lw=1)
    middle, means = curves.envelopes[metric].means()
    axes.plot(middle, smooth(means, smoothing) * chart.scale, color=color, lw=2, label=metric)


# The HTML page


def _write_page(
    run: RunInfo,
    curves: RunCurves,
    charts: Sequence[Chart],
    schedule: Sequence[tuple[int, float]],
    path: Path,
    smoothing: float,
) -> None:
    options = [chart_options(curves, chart, ChartStyle(smoothing), schedule) for chart in charts]
    sections = [SECTION.format(title=html.escape(each.name), hint=html.escape(each.hint.en)) for each in charts]
    name, library = _echarts()
    path.write_text(
        PAGE.format(
            title=html.escape(run.path),
            status=html.escape(f"{run.status}, step {curves.step} of {run.total_steps or 'unknown'}"),
            sections="".join(sections),
            options=json.dumps(options).replace("</", "<\\/"),
            library=library,
            name=name,
        )
    )


def _echarts() -> tuple[str, str]:
    """ECharts as an ES module, as NiceGUI ships it: the name of its export, and its text."""
    directory = files("nicegui") / "elements" / "echart" / "dist"
    entry = (directory / "index.js").read_text()
    found = re.search(r"import\{(\w+) as (\w+),.*?\}from\"\./([^\"]+)\";export\{\2 as echarts", entry)
    if found is None:
        raise UserError("this NiceGUI ships ECharts in another form; install nicegui==3.18.0")
    text = (directory / found[3]).read_text()
    if "</script" in text.lower():
        text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)
    return found[1], text
