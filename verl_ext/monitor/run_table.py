"""The table of all runs: filter, sort, open one, tick several to compare them."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import GenericEventArguments

from verl_ext.metrics.run_record import seconds_of
from verl_ext.monitor.database import RunInfo
from verl_ext.monitor.panels import Panel, tag
from verl_ext.monitor.text import format_seconds, format_time

STATUS_COLORS = {"running": "green", "finished": "blue", "waiting": "amber", "failed": "red"}
STATUS_COLORS |= {"stopped": "grey", "killed": "grey-8"}
LEVELS = ("ok", "notice", "warning", "alarm")
"""Of the health rules' findings, the worst last."""
LEVEL_COLORS = {"ok": "green", "notice": "grey", "warning": "orange", "alarm": "red"}
VALUES = {
    "Loss": "train/loss",
    "Val loss": "val/loss",
    "Reward": "train/reward_total_mean",
}
"""Columns with the latest value of a metric."""
NUMBER = "value => value == null ? '' : Number(value.toPrecision(4)).toString()"
BADGE = """<q-td :props="props">
  <q-badge v-if="props.value" :color="props.row.COLOR">{{ props.row.LABEL }}</q-badge></q-td>"""
LINK = """<q-td :props="props"><a class="text-primary" :href="props.row.href"
  @click.exact.prevent="() => $parent.$emit('open', props.row.path)">{{ props.value }}</a></q-td>"""


class RunTable(Panel):
    """Every run below the root."""

    period_s = 2.0

    def build(self) -> None:
        """Create the filter and the table."""
        with ui.row().classes("w-full items-center gap-4"):
            search = tag(
                ui.input(self.say("Filter runs")).props("clearable dense debounce=200").classes("w-80"), "filter"
            )
            self._compare = tag(ui.button(self.say("Compare selected"), on_click=self._compare_selected), "compare")
            self._compare.props("dense no-caps unelevated").disable()
            ui.label(self.say("Select runs to compare them")).classes("text-xs opacity-70")
        self._table = ui.table(columns=self._columns(), rows=[], row_key="path", selection="multiple", pagination=25)
        tag(self._table.classes("w-full"), "runs", **{"rows-per-page-label": self.say("Rows per page")})
        self._table.props("flat bordered dense")
        self._table.on_select(lambda: self._compare.set_enabled(len(self._table.selected) > 1))
        self._table.on("open", self._open)
        self._table.add_slot("body-cell-path", LINK)
        self._table.add_slot("body-cell-status", BADGE.replace("COLOR", "statusColor").replace("LABEL", "statusLabel"))
        self._table.add_slot("body-cell-health", BADGE.replace("COLOR", "healthColor").replace("LABEL", "healthLabel"))
        search.bind_value_to(self._table, "filter", forward=lambda text: text or "")
        self._empty = tag(ui.label(self.say("No run yet")).classes("text-lg"), "empty")
        self._fill()

    def _columns(self) -> list[dict[str, Any]]:
        text = {"align": "left", "sortable": True}
        number = {"align": "right", "sortable": True, ":format": NUMBER}
        seconds = {"align": "right", "sortable": True}
        columns: dict[str, dict[str, Any]] = {
            "status": {"label": "Status", **text},
            "path": {"label": "Run", **text},
            "stage": {"label": "Stage", **text},
            "recipe": {"label": "Recipe", **text},
            "step": {"label": "Step", "align": "right", "sortable": True, ":format": "(value, row) => row.progress"},
            **{name: {"label": name, **number} for name in VALUES},
            "best": {"label": "Best", "align": "right", "sortable": True, ":format": "(value, row) => row.bestLabel"},
            "health": {"label": "Health", "align": "left", "sortable": True},
            "start": {"label": "Started", **seconds, ":format": "(value, row) => row.startLabel"},
            "duration": {"label": "Duration", **seconds, ":format": "(value, row) => row.durationLabel"},
            "host": {"label": "Host", **text},
        }
        return [
            {**each, "name": name, "field": name, "label": self.say(each["label"])} for name, each in columns.items()
        ]

    async def show(self, run: RunInfo | None) -> None:
        """Fill the table again, since rows of live runs change."""
        self._fill()

    def _fill(self) -> None:
        rows = [self._row(each) for each in self.follower.runs.values()]
        self._empty.set_visibility(not rows)
        self._table.set_visibility(bool(rows))
        if rows != self._table.rows:
            self._table.rows = rows

    def _row(self, run: RunInfo) -> dict[str, Any]:
        (step, latest), total = self.follower.summary(run), run.total_steps
        start, duration = seconds_of(run.first_start), run_seconds(run)
        level = worst_level(run)
        accuracy, dataset, best_step = run.accuracy or (None, "", 0)
        return {
            "path": run.path,
            "href": f"?{urlencode({'run': run.path})}",
            "status": run.status,
            "statusLabel": self.say(run.status),
            "statusColor": STATUS_COLORS[run.status],
            "stage": run.stage or "",
            "recipe": run.recipe or "",
            "step": step,
            "progress": f"{step:,} / {total:,}" if total else f"{step:,}",
            **{name: _finite(latest.get(metric)) for name, metric in VALUES.items()},
            "best": accuracy,
            "bestLabel": ""
            if accuracy is None
            else f"{accuracy:.1%} {dataset}, {self.say('Step').lower()} {best_step}",
            "health": LEVELS.index(level) + 1 if level else 0,
            "healthLabel": self.say(level),
            "healthColor": LEVEL_COLORS.get(level, "grey"),
            "start": start or 0,
            "startLabel": "" if start is None else format_time(start),
            "duration": duration or 0,
            "durationLabel": "" if duration is None else format_seconds(duration),
            "host": run.host or "",
        }

    def _open(self, event: GenericEventArguments) -> None:
        self.go(run=str(event.args), runs=())

    def _compare_selected(self) -> None:
        self.go(run="", runs=tuple(row["path"] for row in self._table.selected), tab="Compare")


def worst_level(run: RunInfo) -> str:
    """The worst present level of a run's health rules; empty if they have reported nothing."""
    known = [level for level in run.levels.values() if level in LEVELS]
    return max(known, key=LEVELS.index, default="")


def run_seconds(run: RunInfo) -> float | None:
    """From the first start to the last end, or until now for a live run; None if it is not known."""
    start = seconds_of(run.first_start)
    end = time.time() if run.status == "running" else seconds_of(run.end)
    return None if start is None or end is None else max(0.0, round(end - start))


def _finite(value: float | None) -> float | None:
    """A number that JSON has."""
    return value if value is not None and abs(value) < float("inf") else None
