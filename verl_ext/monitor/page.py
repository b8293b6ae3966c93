"""The page: a header with the runs, and below it the table of all runs, a comparison, or one run with its tabs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from verl_ext.monitor.colors import LEVELS, LINK_STYLE, PRIMARY_TEXT_STYLE, STATUSES, THEME
from verl_ext.monitor.configuration import ConfigurationPanel
from verl_ext.monitor.curves import RunCurves
from verl_ext.monitor.database import RunInfo
from verl_ext.monitor.file_panels import CheckpointsPanel, HealthPanel, LogPanel
from verl_ext.monitor.flips import EvaluationTab
from verl_ext.monitor.follower import RunFollower
from verl_ext.monitor.keyboard import FOCUS_STYLE, SCRIPT, ShortcutHelp
from verl_ext.monitor.messages import translate_message
from verl_ext.monitor.overview import RunTable, num_alarms, worst_level
from verl_ext.monitor.panels import ComparePanel, Panel, TrainingPanel, heading, tag
from verl_ext.monitor.samples import SamplesPanel
from verl_ext.monitor.state import OF_RUN, TABS, PageState
from verl_ext.monitor.text import LANGUAGES, format_number, format_seconds

UPDATE_S = 0.3
"""Minimum seconds between two updates of a page."""
DOTS = {"running": "🟢", "finished": "🔵", "waiting": "🟡", "failed": "🔴", "stopped": "⚪", "killed": "⚫"}
PANELS: dict[str, type[Panel]] = {
    "Training": TrainingPanel,
    "Evaluation": EvaluationTab,
    "Compare": ComparePanel,
    "Checkpoints": CheckpointsPanel,
    "Samples": SamplesPanel,
    "Health": HealthPanel,
    "Log": LogPanel,
    "Configuration": ConfigurationPanel,
}
SPEED = "throughput/train/samples_per_s"
STATUS_BAR = {
    "Current step": "Steps done",
    "Total steps": "Steps of the whole run",
    "Progress": "Fraction of the steps that are done",
    "Time left": "Estimated from the speed of the last 50 steps",
    "Loss now": "Loss of the last batch; it should fall step by step",
    "Learning rate": "Learning rate of the last step; it should follow its schedule",
    "Speed": "Speed of the last step; it should be stable",
}
"""Label and hint of each value in the status bar."""
ON_BACK = "addEventListener('popstate', () => emitEvent('address', location.search));"
WRAP_STYLE = """body { overflow-wrap: anywhere } .q-table { overflow-wrap: normal }
.q-field, .q-table__container { max-width: 100% }
.q-field:not([class*="min-w-"]), .q-table__container { min-width: 0 }"""
"""Long names wrap instead of making the page wider than a phone; tables scroll by themselves."""
SET_LANGUAGE = "document.documentElement.lang = '{}'"
LOAD_CHARTS = "<script type='module' async>import 'nicegui-echart'</script>"
"""Loads ECharts beside the other scripts; otherwise the browser loads it after them."""
LOAD_CHARTS_LATER = "<script>addEventListener('load', () => import('nicegui-echart'))</script>"
"""Loads ECharts for the run that the visitor opens next, once the page is complete."""


class MonitorPage:
    """One open page; it builds itself where it is created."""

    def __init__(self, follower: RunFollower, state: PageState) -> None:
        self.follower, self.state = follower, state
        self._runs_version = -1
        self._title = ""
        self._shown: object = None  # what the panel showed at its last update
        ui.colors(**THEME)
        ui.add_css(PRIMARY_TEXT_STYLE + LINK_STYLE + FOCUS_STYLE + WRAP_STYLE)
        self._dark = ui.dark_mode(state.dark)
        ui.add_head_html(f"<script>{ON_BACK}{SCRIPT}{SET_LANGUAGE.format(state.language)}</script>")
        ui.on("address", self._go_back)
        ui.on("shortcut", self._use_shortcut)
        self._head = ui.header(bordered=True).classes(
            "items-center gap-4 px-4 py-2 bg-[white] text-[black] dark:bg-[#171717] dark:text-[white]"
        )
        self._box = ui.column().classes("w-full max-w-screen-2xl mx-auto p-2")
        self._build()
        has_charts = isinstance(self._panel, (TrainingPanel, EvaluationTab, ComparePanel))
        ui.add_head_html(LOAD_CHARTS if has_charts else LOAD_CHARTS_LATER)
        ui.timer(UPDATE_S, self.update_status)

    @property
    def run(self) -> RunInfo | None:
        """The shown run; None if there is none, or it no longer exists."""
        return self.follower.runs.get(self.state.run)

    # Navigation

    def go(self, *, push: bool = True, **changes: Any) -> None:
        """Change the state and the address.

        Args:
            push: whether to build the page again and let Back return to the previous state; otherwise the address is
                replaced, for settings within a panel.
            changes: new values of `PageState`'s attributes.
        """
        for name, value in changes.items():
            setattr(self.state, name, value)
        change = ui.navigate.history.push if push else ui.navigate.history.replace
        change(self.state.to_query())
        if push:
            self._build()

    def open_run(self, path: str) -> None:
        """Open a run, or the table for an empty path; the tab stays, except after a comparison without a run."""
        if path != self.state.run or self.state.runs:
            changes = {**OF_RUN, "run": path, "runs": ()}
            if self.state.runs and not self.state.run:
                changes |= {"tab": TABS[0], "metrics": ()}
            self.go(**changes)

    def _choose_run(self, event: ValueChangeEventArguments) -> None:
        if event.value and event.value != self.state.run:  # otherwise the page itself has set it
            self.open_run(event.value)

    def _go_back(self, event: GenericEventArguments) -> None:
        """Handle Back and Forward of the browser."""
        self.state = PageState.from_query(str(event.args), self.state.preferences)
        self._build()

    def _open_tab(self, tab: str) -> None:
        if tab != self.state.tab:
            self.state.tab = tab
            ui.navigate.history.push(self.state.to_query())
            self._build_panel()

    def _use_shortcut(self, event: GenericEventArguments) -> None:
        """Handle a key; see `keyboard.SHORTCUTS`."""
        key, paths = str(event.args), [*self.follower.runs]
        if key == "?":
            self._help.toggle()
        elif key in "[]" and paths:
            place = paths.index(self.state.run) if self.state.run in paths else -1
            self.open_run(paths[(place + 1 if key == "]" else max(place, 0) - 1) % len(paths)])
        elif key.isdecimal() and int(key) <= len(TABS) and self.run is not None:
            self._tabs.set_value(TABS[int(key) - 1])

    def _set_language(self, language: str) -> None:
        self.state.preferences["language"] = language
        ui.run_javascript(SET_LANGUAGE.format(language))
        self._build()

    def _set_dark(self, dark: bool) -> None:
        self.state.preferences["dark"] = dark
        self._dark.set_value(dark)
        self._shown = None  # the panel redraws its charts; the browser styles everything else

    # Building

    def _build(self) -> None:
        """Draw everything in the selected language and colors."""
        self._status: RunStatusBar | None = None
        self._had_run = self.run is not None
        self._build_head()
        self._box.clear()
        with self._box:
            if self.run is not None:
                self._status = RunStatusBar(self.state)
                self._show_status(self.run)
                self._build_tabs()
            elif self.state.run:
                text = self.state.translate("This run does not exist, or its directory is gone")
                tag(ui.label(text).classes("text-lg"), "missing")
            self._panel_box = ui.column().classes("w-full")
            self._build_panel()

    def _build_head(self) -> None:
        say = self.state.translate
        self._head.clear()
        with self._head:
            with ui.element("div").props("role=heading aria-level=1"):
                home = ui.link(say("Training monitor"), ".").classes("text-lg font-bold text-inherit no-underline")
            tag(home, "home").on("click.prevent", lambda: self.open_run(""))
            self._select = ui.select({}, label=say("Run"), with_input=True).classes("grow").props("dense outlined")
            tag(self._select, "run").on_value_change(self._choose_run)
            language = tag(ui.toggle(LANGUAGES, value=self.state.language), "language")
            language.props("dense no-caps unelevated").on_value_change(lambda event: self._set_language(event.value))
            dark = tag(ui.switch(say("Dark"), value=self.state.dark), "dark")
            dark.on_value_change(lambda event: self._set_dark(event.value))
            self._help = ShortcutHelp(say)
        self._offer_runs()
        self._set_title()

    def _offer_runs(self) -> None:
        """Fill the selector with status and path of every run."""
        self._runs_version = self.follower.version
        names = {
            run.path: f"{DOTS[run.status]} {run.path} · {self.state.translate(run.status)}"
            for run in self.follower.runs.values()
        }
        shown = self.state.run if self.state.run in names else None
        if names != self._select.options or self._select.value != shown:
            self._select.set_options(names, value=shown)

    def _set_title(self) -> None:
        """Count the current alarms of all runs in the title, which shows behind other windows, too."""
        alarms, title = num_alarms(self.follower.runs), self.state.translate("Training monitor")
        title = f"({alarms}) {title}" if alarms else title
        if title != self._title:
            self._title = title
            ui.page_title(title)

    def _build_tabs(self) -> None:
        tabs = ui.tabs(value=self.state.tab).classes("w-full")
        with tabs.props("dense no-caps align=left outside-arrows mobile-arrows"):
            for name in TABS:
                tag(ui.tab(name, label=self.state.translate(name)), f"tab {name}")
        self._tabs = tabs.on_value_change(lambda event: self._open_tab(event.value))

    def _build_panel(self) -> None:
        kind = PANELS[self.state.tab] if self.run is not None else ComparePanel if self.state.runs else RunTable
        self._shown = None
        self._last_look = 0.0
        self._panel_box.clear()
        with self._panel_box:
            self._panel: Panel = kind(self.follower, self.state, self.go)
            ui.timer(UPDATE_S, self.update_panel)  # ends with the panel, even while it reads slow files
            if isinstance(self._panel, TrainingPanel):  # the page arrives with its charts, others read files
                self._shown, self._last_look = self._news(), time.monotonic()
                self._panel.redraw()

    # Updates

    def update_status(self) -> None:
        """Update the list of runs and the progress of the shown run."""
        if (self.run is not None) != self._had_run:  # the run of this address has appeared or disappeared
            self._build()
        if self._runs_version != self.follower.version:
            self._offer_runs()
            self._set_title()
        if self.run is not None:
            self._show_status(self.run)

    def _show_status(self, run: RunInfo) -> None:
        if self._status is not None:
            self._status.show(run, self.follower.curves(run), self.follower.problems_of(run))

    def _news(self) -> object:
        """Return a value that differs when there are new rows or runs."""
        run = self.run
        return self.follower.version, run and self.follower.curves(run).version

    async def update_panel(self) -> None:
        """Update the open panel; charts, and panels that read files, are updated less often."""
        panel, news = self._panel, self._news()
        waited = time.monotonic() - self._last_look
        is_due = waited > panel.period_s if panel.period_s else news != self._shown and waited > panel.pause_s
        if self._shown is None or is_due:
            self._shown, self._last_look = news, time.monotonic()
            await panel.show()


class RunStatusBar:
    """Status, progress, and the latest values of a run."""

    def __init__(self, state: PageState) -> None:
        self._state, self._say = state, state.translate
        with ui.row().classes("w-full items-center gap-2"):
            self._path = tag(heading("", "text-lg font-medium break-all", level=2), "shown")
            self._status = tag(ui.badge(), "status")
            self._mode = tag(ui.badge(color="neutral"), "mode")
            self._health = tag(ui.badge(), "worst")
            self._reason = tag(ui.label().classes("text-sm opacity-70"), "reason")
        bar = ui.linear_progress(show_value=False, size="6px").props("rounded instant-feedback")
        self._bar = tag(bar, "progress", **{"aria-label": self._say("Progress")})
        self._values: dict[str, ui.label] = {}
        with ui.element("div").classes("w-full grid grid-cols-2 sm:grid-cols-4 lg:grid-cols-7 gap-2"):
            for name, hint in STATUS_BAR.items():
                with ui.card().tight().props("flat bordered").classes("px-3 py-1"):
                    ui.label(self._say(name)).classes("text-xs opacity-70")
                    self._values[name] = tag(ui.label("-").classes("text-lg whitespace-nowrap"), f"value {name}")
                    ui.tooltip(self._say(hint))

    def show(self, run: RunInfo, curves: RunCurves, problems: Mapping[str, str]) -> None:
        """Show the current status of a run; `problems` has the reason by path of a file that cannot be read."""
        with curves.lock:
            step, latest = curves.step, dict(curves.latest)
            left = curves.seconds_left(run.total_steps) if run.status == "running" else None
        level = worst_level(run)
        self._path.set_text(run.path)
        self._status.set_text(self._say(run.status))
        self._status.props["color"] = STATUSES[run.status]
        self._mode.set_text(self._say("Live" if run.status == "running" else "History"))
        self._health.set_text(f"{self._say('Health')}: {self._say(level)}")
        self._health.props["color"] = LEVELS.get(level, "neutral")
        self._health.set_visibility(level not in ("", "ok"))
        self._reason.set_text(self._reason_of(run, problems))
        share = step / run.total_steps if run.total_steps else 0.0
        self._bar.set_value(min(share, 1.0))
        values = {
            "Current step": f"{step:,}",
            "Total steps": f"{run.total_steps:,}" if run.total_steps else "-",
            "Progress": f"{share:.1%}",
            "Time left": "-" if left is None else format_seconds(left),
            "Loss now": format_number(latest.get("train/loss")),
            "Learning rate": format_number(latest.get("train/lr(1e-3)"), 1e-3),
            "Speed": self._speed(latest),
        }
        for name, text in values.items():
            self._values[name].set_text(text)

    def _reason_of(self, run: RunInfo, problems: Mapping[str, str]) -> str:
        """Say how the last attempt ended, and which files and how many lines of metrics.jsonl cannot be read."""
        parts = [translate_message(self._state.language, run.exit_reason)] if run.exit_reason else []
        parts += [f"{run.unreadable} {self._say('unreadable lines of metrics.jsonl')}"] if run.unreadable else []
        parts += [self._say("{} cannot be read ({})").format(name, reason) for name, reason in problems.items()]
        return " · ".join(parts)

    def _speed(self, latest: dict[str, float]) -> str:
        return f"{latest[SPEED]:,.1f} {self._say('samples/s')}" if SPEED in latest else "-"
