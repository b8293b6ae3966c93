"""Writes charts without a server: PNG files and one self-contained HTML page."""

from __future__ import annotations

import html
import json
import re
import tempfile
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import METRICS_FILE
from verl_ext.metrics.run_record import require_run_files
from verl_ext.monitor.chart_options import ChartStyle, chart_options, unit_text
from verl_ext.monitor.charts import Chart, charts_for, schedule_points
from verl_ext.monitor.curves import RunCurves
from verl_ext.monitor.database import RunInfo
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.run_files import config_or_empty

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
const evaluate = value => Object.entries(value).forEach(([key, part]) => {{  // functions, as in NiceGUI
  if (key.startsWith(":")) value[key.slice(1)] = new Function("return " + part)();
  else if (part && typeof part === "object") evaluate(part);
}});
evaluate(options);
document.querySelectorAll("section div").forEach((box, place) => {{
  const chart = library.{name}.init(box);
  chart.setOption(options[place]);
  addEventListener("resize", () => chart.resize());
}});
</script></body></html>
"""
SECTION = "<section><h2>{title}</h2><p>{hint}</p><div></div></section>"


def plot_run(run_dir: Path, output: Path, smoothing: float) -> list[Path]:
    """Write each chart of a run as PNG, and one page with all charts; returns the PNG files.

    Raises:
        UserError: the directory has no started run, or the run has no metrics with a chart.
        OSError: a file cannot be written.
    """
    run, curves = read_run(run_dir)
    schedule, style = schedule_points(config_or_empty(run_dir), run, curves), ChartStyle(smoothing)
    charts = {each: chart_options(curves, each, style, schedule) for each in charts_for(curves.envelopes)}
    if not charts:
        raise UserError(f"{run_dir / METRICS_FILE} has no metrics to plot yet; the run has not logged a training step")
    status = f"{run.status}, step {curves.step} of {run.total_steps or 'unknown'}"
    output.mkdir(parents=True, exist_ok=True)
    _write_page(output / PAGE_FILE, run.path, status, charts)
    return [_write_png(output, run.path, chart, options) for chart, options in charts.items()]


def read_run(run_dir: Path) -> tuple[RunInfo, RunCurves]:
    """Read one run into a temporary database."""
    require_run_files(run_dir, METRICS_FILE)
    directory = run_dir.resolve()
    with tempfile.TemporaryDirectory(prefix="verl_ext_plot_") as temporary:
        follower = RunFollower(Path(temporary) / "plot.sqlite", directory.parent)
        try:
            run = follower.read_one(directory)
            return run, follower.curves(run)
        finally:
            follower.stop()


def _write_png(directory: Path, run: str, chart: Chart, options: Mapping[str, Any]) -> Path:
    """Draw a chart like ECharts."""
    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    for line in options["series"]:
        style = line["lineStyle"]
        axes.plot(
            *np.array(line["data"], float).reshape(-1, 2).T,
            color=line["itemStyle"]["color"],
            alpha=style.get("opacity"),
            ls=style.get("type", "solid"),
            lw=style["width"],
            marker="o" if line["showSymbol"] else None,
            zorder=line.get("z", 2),
            label=None if "opacity" in style else line["name"],
        )
    for mark in options["series"][0]["markLine"]["data"]:
        color = mark["lineStyle"]["color"]
        if "yAxis" in mark:
            axes.axhline(mark["yAxis"], color=color, lw=1)
            continue
        axes.axvline(mark["xAxis"], color=color, ls="dotted", lw=1)
        label = mark["label"]["formatter"]
        axes.annotate(label, (mark["xAxis"], 1), xycoords=("data", "axes fraction"), fontsize=8, color=color)
    # without math mode, because a path may have dollar signs
    axes.set_title(f"{chart.name} · {run}", parse_math=False)
    axes.set_xlabel("steps over all attempts")
    axes.set_ylabel(unit_text(chart.unit, "en"))
    axes.grid(alpha=0.3)
    for text in axes.legend(fontsize=8).get_texts():
        text.set_parse_math(False)
    path = directory / f"{re.sub(r'[^a-z0-9]+', '_', chart.name.lower())}.png"
    figure.savefig(path)
    return path


def _write_page(path: Path, run: str, status: str, charts: Mapping[Chart, Mapping[str, Any]]) -> None:
    sections = [SECTION.format(title=html.escape(each.name), hint=html.escape(each.hint)) for each in charts]
    name, library = _echarts()
    path.write_text(
        PAGE.format(
            title=html.escape(run),
            status=html.escape(status),
            sections="".join(sections),
            options=json.dumps([*charts.values()]).replace("</", "<\\/"),
            library=library,
            name=name,
        ),
        encoding="utf-8",
    )


def _echarts() -> tuple[str, str]:
    """Return ECharts from NiceGUI as an ES module: the name of its export, and its source."""
    directory = files("nicegui") / "elements" / "echart" / "dist"
    entry = (directory / "index.js").read_text()
    found = re.search(r"import\{(\w+) as (\w+),.*?\}from\"\./([^\"]+)\";export\{\2 as echarts", entry)
    if found is None:
        raise UserError("this version of NiceGUI ships ECharts in another format; install nicegui==3.18.0")
    return found[1], re.sub(r"</(script)", r"<\\/\1", (directory / found[3]).read_text(), flags=re.IGNORECASE)
