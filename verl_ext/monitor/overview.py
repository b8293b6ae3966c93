"""The first page: current warnings of all runs, and the table of runs in chains."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from itertools import islice
from typing import Any
from urllib.parse import urlencode

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from verl_ext.metrics.run_record import seconds_of
from verl_ext.monitor.colors import LEVELS, STATUSES
from verl_ext.monitor.database import LogEvent, RunInfo
from verl_ext.monitor.lineage import Parent, chains, parents_of
from verl_ext.monitor.messages import translate_event
from verl_ext.monitor.panels import Panel, columns_of, data_table, tag
from verl_ext.monitor.state import MAX_COMPARED
from verl_ext.monitor.text import format_seconds, format_time

VALUES = {
    "Loss": "train/loss",
    "Val loss": "val/loss",
    "Reward": "train/reward_total_mean",
}
"""Columns of the run table that show the latest value of a metric."""
NUMBER = "value => typeof value === 'number' ? Number(value.toPrecision(4)).toString() : value ?? ''"
LABEL = "(value, row) => row.{}Label"
COLUMNS = (
    ("status", "Status", "left", None),
    ("path", "Run", "left", None),
    ("stage", "Stage", "left", None),
    ("recipe", "Recipe", "left", None),
    ("step", "Step", "right", None),
    *((name, name, "right", NUMBER) for name in VALUES),
    ("best", "Best", "right", LABEL),
    ("health", "Health", "left", None),
    ("start", "Started", "right", LABEL),
    ("duration", "Duration", "right", LABEL),
    ("host", "Host", "left", None),
)
"""Name, label, alignment and browser-side format of each column; columns are sorted by unformatted values."""
BADGE = """<q-td :props="props">
  <q-badge v-if="props.value" :color="props.row.NAMEColor">{{ props.row.NAMELabel }}</q-badge></q-td>"""
LINK = """<q-td :props="props"><div class="whitespace-normal break-words min-w-36 max-w-48 sm:max-w-sm"
    :style="{paddingLeft: `${props.row.depth * 1.25}rem`}">
  <span v-if="props.row.depth" aria-hidden="true" class="opacity-70">↳ </span>
  <a :href="props.row.href"
    @click.exact.prevent="() => $parent.$emit('open', [props.row.run, props.row.tab])">{{ props.row.label }}</a>
  <span class="text-xs opacity-70 ml-2">{{ props.row.from }}</span></div></q-td>"""
PROGRESS = """<q-td :props="props">{{ props.row.stepLabel }}
  <q-linear-progress v-if="props.row.share != null" :value="props.row.share" :color="props.row.statusColor"
    size="4px" rounded instant-feedback :aria-label="props.row.stepLabel" />
  <span v-if="props.row.left" class="text-xs opacity-70">{{ props.row.left }}</span></q-td>"""
CHECKBOX = (
    '<q-checkbox v-if="props.row.run === props.row.path" v-model="props.selected" dense :aria-label="props.row.path" />'
)
ROWS_PER_PAGE = 25
CHECKBOX_OF_ALL = '<q-checkbox v-model="props.selected" dense aria-label="{}" />'
SHOWN_ALARMS = 5
"""Number of warnings above the table; a fold has the others."""
CURRENT_S = 86_400.0
"""A finding is current if its run is running, or for this long after it was reported."""


class RunTable(Panel):
    """The current warnings, and every run below the root."""

    period_s = 2.0

    def build(self) -> None:
        """Create the list of warnings, the filter and the table."""
        self._alarms = AlarmList(self)
        self._problems = tag(ui.label().classes("w-full text-sm whitespace-pre-line"), "problems")
        with ui.row().classes("w-full items-center gap-4"):
            search = ui.input(self.say("Filter runs"), value=self.state.filter).classes("w-full sm:w-80")
            tag(search.props("clearable dense debounce=200"), "filter").on_value_change(
                lambda event: self.go(push=False, filter=event.value or "")
            )
            self._compare = tag(ui.button(self.say("Compare selected"), on_click=self._compare_selected), "compare")
            self._compare.props("dense no-caps unelevated")
            self._advice = tag(ui.label().classes("text-xs opacity-70"), "advice")
        labels = {name: label for name, label, *_ in COLUMNS}
        columns = [
            column | {"align": align} | ({":format": form.format(name)} if form else {})
            for column, (name, _, align, form) in zip(columns_of(labels, lambda name: self.say(labels[name])), COLUMNS)
        ]
        options: dict[str, Any] = {"selection": "multiple", "pagination": self._pagination()}
        templates = {
            "body-cell-path": LINK,
            "body-cell-step": PROGRESS,
            "body-selection": CHECKBOX,
            "header-selection": CHECKBOX_OF_ALL.format(self.say("Select all runs on this page")),
            **{f"body-cell-{name}": BADGE.replace("NAME", name) for name in ("status", "health")},
        }
        self._table = data_table("runs", columns, "path", self.say, templates=templates, **options)
        self._table.props("hide-selected-banner", remove="wrap-cells")
        self._table.on_select(self._count_selected)
        self._table.on_pagination_change(self._sort)
        self._table.on("open", self._open)
        search.bind_value_to(self._table, "filter", forward=lambda text: text or "")
        self._count_selected()
        self._empty = tag(ui.label(self.say("No run yet")).classes("text-lg"), "empty")
        self.redraw()

    def redraw(self) -> None:
        """Update the warnings and the rows of the table."""
        self._alarms.redraw()
        self._problems.set_text("\n".join(self._problem_lines()))
        self._problems.set_visibility(bool(self.follower.problems))
        runs = self.follower.runs
        parents = parents_of({path: run.origin for path, run in runs.items()})
        rows = []
        for path, depth in chains(parents):
            rows.append(self._row(runs[path], depth, parents[path]))
            rows += self._evaluations(runs[path], depth + 1)
        if self.state.sort:  # another order separates rows from the run that they belong to
            rows = [row | {"depth": 0} | row["sorted"] for row in rows]
        self._empty.set_visibility(not rows)
        self._table.set_visibility(bool(rows))
        if rows != self._table.rows:
            self._table.rows = rows
            self._count_selected()

    def _problem_lines(self) -> list[str]:
        """Say which files cannot be read."""
        text, problems = self.say("{} cannot be read ({})"), self.follower.problems
        lines = [text.format(path, reason) for path, reason in islice(problems.items(), SHOWN_ALARMS)]
        return lines + ([f"… (+{len(problems) - SHOWN_ALARMS})"] if len(problems) > SHOWN_ALARMS else [])

    def _row(self, run: RunInfo, depth: int, parent: Parent | None) -> dict[str, Any]:
        (step, latest), total = self.follower.summary(run), run.total_steps
        start, duration = seconds_of(run.first_start), run_seconds(run)
        level = worst_level(run)
        left = self.follower.seconds_left(run)
        origin = "" if parent is None or parent.step is None else f"{self.say('from step')} {parent.step}"
        return {
            "path": run.path,
            "run": run.path,
            "tab": "",
            "label": run.path,
            "depth": depth,
            "from": origin,
            "sorted": {} if parent is None else {"from": f"{parent.path} {origin}".strip()},
            "href": f"?{urlencode({'run': run.path})}",
            "status": run.status,
            "statusLabel": self.say(run.status),
            "statusColor": STATUSES[run.status],
            "stage": run.stage or "",
            "recipe": run.recipe or "",
            "step": step,
            "stepLabel": f"{step:,} / {total:,}" if total else f"{step:,}",
            "share": min(step / total, 1.0) if total else None,
            "left": "" if left is None else f"{format_seconds(left)} {self.say('left')}",
            **{name: _as_json(latest.get(metric)) for name, metric in VALUES.items()},
            "best": None,
            "bestLabel": "",
            "health": ["", *LEVELS].index(level) or None,
            "healthLabel": self.say(level),
            "healthColor": LEVELS.get(level, "neutral"),
            "start": start,
            "startLabel": "" if start is None else format_time(start),
            "duration": duration,
            "durationLabel": "" if duration is None else format_seconds(duration),
            "host": run.host or "",
        }

    def _evaluations(self, run: RunInfo, depth: int) -> list[dict[str, Any]]:
        """Return a row for each dataset on which checkpoints of a run were evaluated."""
        return [
            {
                "path": f"{run.path}\0{dataset}",
                "run": run.path,
                "tab": "Evaluation",
                "label": dataset,
                "depth": depth,
                "from": "",
                "sorted": {"label": f"{run.path} · {dataset}"},
                "href": f"?{urlencode({'run': run.path, 'tab': 'Evaluation'})}",
                "stage": self.say("evaluation"),
                "best": accuracy,
                "bestLabel": f"{accuracy:.1%}, {self.say('Step').lower()} {step}",
            }
            for dataset, (accuracy, step) in run.accuracies.items()
        ]

    def _open(self, event: GenericEventArguments) -> None:
        path, tab = event.args
        self.go(run=str(path), runs=(), **({"tab": str(tab)} if tab else {}))

    def _selected(self) -> tuple[str, ...]:
        return tuple(row["path"] for row in self._table.selected)

    def _pagination(self) -> dict[str, Any]:
        """Return the page size and the order of the rows, as Quasar describes them."""
        name = self.state.sort.removeprefix("-")
        order = {"sortBy": name, "descending": self.state.sort.startswith("-")}
        return {"rowsPerPage": ROWS_PER_PAGE, **(order if name in {column for column, *_ in COLUMNS} else {})}

    def _sort(self, event: ValueChangeEventArguments) -> None:
        name = event.value.get("sortBy") or ""
        order = f"-{name}" if name and event.value.get("descending") else name
        if order != self.state.sort:
            self.change(sort=order)

    def _count_selected(self) -> None:
        """Say how many runs are selected; evaluations, which the header selects, too, and deleted runs are not."""
        known = {row["path"] for row in self._table.rows if row["path"] == row["run"]}
        kept = [row for row in self._table.selected if row["path"] in known]
        if len(kept) < len(self._table.selected):
            self._table.selected = kept
        count = len(self._selected())
        self._compare.set_enabled(1 < count <= MAX_COMPARED)
        text = self.say("Select 2 to {} runs to compare them").format(MAX_COMPARED)
        self._advice.set_text(f"{text} ({self.say('{} selected').format(count)})" if count else text)

    def _compare_selected(self) -> None:
        self.go(run="", runs=self._selected(), tab="Compare")


class AlarmList:
    """The current warnings and alarms of all runs, newest first; a click opens the run's Health tab."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._shown: object = None
        self._lines: dict[tuple[str, LogEvent], ui.link] = {}
        self._box = tag(ui.column().classes("w-full gap-1"), "alarms")
        self._fold = tag(ui.expansion().classes("w-full").props("dense"), "earlier")
        with self._fold:
            self._earlier = ui.column().classes("w-full gap-1")

    def redraw(self) -> None:
        """Draw the findings that have changed; the others keep the focus."""
        found = current_findings(self._panel.follower.runs)
        if found == self._shown:
            return
        self._shown = found
        for key in self._lines.keys() - {*found}:
            self._lines.pop(key).delete()
        for box, keys in ((self._box, found[:SHOWN_ALARMS]), (self._earlier, found[SHOWN_ALARMS:])):
            for place, key in enumerate(keys):
                if key not in self._lines:
                    with box:
                        self._lines[key] = self._line(*key)
                line = self._lines[key]
                if [*box][place : place + 1] != [line]:
                    line.move(box, place)
        self._fold.set_text(f"{self._panel.say('Earlier warnings')} ({len(found) - SHOWN_ALARMS})")
        self._fold.set_visibility(len(found) > SHOWN_ALARMS)

    def _line(self, path: str, event: LogEvent) -> ui.link:
        link = ui.link(target=f"?{urlencode({'run': path, 'tab': 'Health'})}")
        link.classes("w-full flex flex-wrap items-baseline gap-x-2 rounded border border-gray-500 p-2")
        link.classes("text-inherit no-underline")
        tag(link, "alarm").on("click.prevent", lambda: self._panel.go(run=path, runs=(), tab="Health"))
        with link:
            ui.badge(self._panel.say(event.kind), color=LEVELS[event.kind])
            ui.label(path).classes("font-medium break-all")
            ui.label(translate_event(self._panel.state.language, event)).classes("text-sm break-words min-w-0")
            ui.label(format_time(event.time)).classes("text-xs opacity-70")
        return link


def current_findings(runs: Mapping[str, RunInfo]) -> list[tuple[str, LogEvent]]:
    """Return path and finding of the current warnings and alarms of all runs, newest first."""
    now = time.time()
    found = [
        (path, event)
        for path, run in runs.items()
        for event in run.findings
        if event.kind in ("warning", "alarm") and (run.status == "running" or now - event.time < CURRENT_S)
    ]
    return sorted(found, key=lambda each: -each[1].time)


def num_alarms(runs: Mapping[str, RunInfo]) -> int:
    """Return the number of current alarms of all runs."""
    return sum(event.kind == "alarm" for _, event in current_findings(runs))


def worst_level(run: RunInfo) -> str:
    """Return the worst current level of a run's health rules; empty if they have reported nothing."""
    levels = {event.kind for event in run.findings}
    return next((level for level in reversed(LEVELS) if level in levels), "")


def run_seconds(run: RunInfo) -> float | None:
    """Return the time from the first start to the last end, or until now for a live run; None if unknown."""
    start = seconds_of(run.first_start)
    end = time.time() if run.status == "running" else seconds_of(run.end)
    return None if start is None or end is None else max(0.0, round(end - start))


def _as_json(value: float | None) -> float | str | None:
    """Return a number, or the text nan, inf or -inf, because JSON has only finite numbers."""
    return value if value is None or math.isfinite(value) else f"{value}"
