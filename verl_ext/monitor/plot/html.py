"""All charts on one HTML page with everything in it, to be opened from a disk or an e-mail."""

from __future__ import annotations

import html
import json
import re
from importlib.resources import files
from pathlib import Path

from verl_ext.errors import UserError
from verl_ext.monitor.charts import charts_for
from verl_ext.monitor.options import chart_option
from verl_ext.monitor.view import RunView

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font-family: sans-serif; margin: 1em; color: #374151 }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }}
h2 {{ font-size: 1em; margin: 0 0 .3em }}
section div {{ height: 300px }}
</style></head><body>
<h1>{title}</h1><p>{told}</p><main>{sections}</main>
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


def write_page(view: RunView, path: Path, smoothing: float) -> None:
    """Write the page.

    Args:
        view: of the run.
        path: of the HTML file.
        smoothing: weight of `smooth`.

    Raises:
        UserError: NiceGUI's copy of ECharts is not where it was.
        OSError: the file cannot be written.
    """
    charts = charts_for(view.metrics)
    options = [chart_option(view, chart, smoothing, "en", dark=False) for chart in charts]
    name, library = echarts()
    standing = view.standing()
    path.write_text(
        PAGE.format(
            title=html.escape(view.record["path"]),
            told=html.escape(f"{view.record['status']}, step {standing.step} of {standing.total_steps or 'unknown'}"),
            sections="".join(f"<section><h2>{html.escape(chart.name)}</h2><div></div></section>" for chart in charts),
            options=json.dumps(options).replace("</", "<\\/"),
            library=library,
            name=name,
        )
    )


def echarts() -> tuple[str, str]:
    """ECharts as an ES module, as NiceGUI ships it: the name it is exported by, and its text.

    Raises:
        UserError: the package has another layout.
    """
    directory = files("nicegui") / "elements" / "echart" / "dist"
    entry = (directory / "index.js").read_text()
    found = re.search(r"import\{(\w+) as (\w+),.*?\}from\"\./([^\"]+)\";export\{\2 as echarts", entry)
    if found is None:
        raise UserError("this NiceGUI ships ECharts in another way; install nicegui==3.18.0")
    text = (directory / found[3]).read_text()
    if "</script" in text.lower():
        text = re.sub(r"</(script)", r"<\\/\1", text, flags=re.IGNORECASE)
    return found[1], text
