"""The tab Samples: browser for logged completions and evaluated answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from nicegui import run as background
from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from verl_ext.metrics.jsonl import SAMPLES_FILE
from verl_ext.monitor.follower import stamp_of
from verl_ext.monitor.panels import Panel, clip, tag

ROW_KEY = "__row"
"""Key for the number of a sample in the list; not `id`, because samples may have such a column."""
SAMPLES_BYTES = 16 << 20
"""Number of bytes to read from the end of a sample file."""
MAX_SAMPLES = 1000
"""Maximum number of samples in the list; a search covers all samples that were read."""
FIRST_COLUMNS = ("step", "error_type", "reward_total", "pass_ratio", "advantage")
SHORT_CHARACTERS = 24
"""Maximum length of values in a short column."""
MAX_SHORT_COLUMNS, MAX_LONG_COLUMNS = 5, 2


class SamplesPanel(Panel):
    """Browser for `samples.jsonl` and the evaluations' `qa_logs`: a list and the full selected sample."""

    period_s = 3.0

    def build(self) -> None:
        """Create the controls, the list and the card of the selected sample."""
        self._read: tuple[Path, str] | None = None
        self._is_cut = False
        self._samples: list[dict[str, Any]] = []
        with ui.row().classes("w-full items-center gap-4"):
            self._source = tag(ui.select([], label=self.say("Source")).classes("min-w-64"), "sample source")
            self._source.on_value_change(self._choose_source)
            self._step = tag(ui.select([None], label=self.say("Step")).classes("min-w-32"), "sample step")
            self._step.on_value_change(self._choose_step)
            search = ui.input(self.say("Search"), value=self.state.search).props("clearable debounce=300")
            tag(search.classes("w-72"), "sample search").on_value_change(self._search)
            self._note = ui.label(self.say("Only the newest samples of the file are shown")).classes(
                "text-xs opacity-70"
            )
            self._note.set_visibility(False)
        with ui.element("div").classes("w-full grid grid-cols-1 lg:grid-cols-5 gap-4 items-start"):
            self._table = ui.table(columns=[], rows=[], row_key=ROW_KEY, selection="single", pagination=20)
            self._table.classes("w-full lg:col-span-3 [&_.q-table--col-auto-width]:hidden cursor-pointer")
            self._table.props("flat bordered dense hide-selected-banner").props["no-data-label"] = self.say(
                "Nothing yet"
            )
            tag(self._table, "samples").on("row-click", self._select)
            card = ui.card().classes("w-full lg:col-span-2 p-3 gap-3").props("flat bordered")
            self._detail = tag(card, "sample")
        self._show_sample(None)

    async def show(self) -> None:
        """Read the chosen file in a thread if it has changed."""
        run = self.run
        if run is None:
            return
        directory = self.follower.directory(run)
        sources = sample_sources(directory)
        chosen = self.state.source if self.state.source in sources else next(iter(sources), "")
        labels = {name: self.say("training") if name == SAMPLES_FILE else label for name, label in sources.items()}
        if labels != self._source.options or (self._source.value or "") != chosen:
            self._source.set_options(labels, value=chosen or None)
        try:
            read = (directory / chosen, stamp_of(directory / chosen)) if chosen else None
        except OSError:
            return
        if read != self._read:
            found = ([], False) if read is None else await self._read_file(*read)
            if found is not None:
                self._samples, self._is_cut = found
                self._read = read
                self._draw()

    async def _read_file(self, path: Path, stamp: str) -> tuple[list[dict[str, Any]], bool]:
        return await background.io_bound(self.follower.files.get, ("samples", path), stamp, partial(read_samples, path))

    def _draw(self) -> None:
        """List the samples of the chosen step that contain the searched text."""
        steps = sorted({row["step"] for row in self._samples if isinstance(row.get("step"), int)})
        options = {None: self.say("All steps"), **{step: str(step) for step in steps}}
        step = self.state.step if self.state.step in options else None
        self._step.set_options(options, value=step)
        self._step.set_visibility(bool(steps))
        self._note.set_visibility(self._is_cut)
        text = self.state.search.lower()
        listed = [
            (number, row)
            for number, row in enumerate(self._samples)
            if (step is None or row.get("step") == step)
            and (not text or any(text in as_text(value).lower() for value in row.values()))
        ]
        names = sample_columns([row for _, row in listed])
        self._table.columns = [
            {"name": name, "label": name, "field": name, "align": "left", "sortable": True} for name in names
        ]
        self._table.rows = [
            {name: as_cell(row.get(name)) for name in names} | {ROW_KEY: number} for number, row in listed[:MAX_SAMPLES]
        ]

    def _select(self, event: GenericEventArguments) -> None:
        shown = event.args[1]
        number = shown[ROW_KEY]
        if isinstance(number, int) and 0 <= number < len(self._samples):
            self._table.selected = [shown]
            self._show_sample(self._samples[number])

    def _show_sample(self, row: dict[str, Any] | None) -> None:
        """Show all fields of a sample as text."""
        self._detail.clear()
        with self._detail:
            if row is None:
                ui.label(self.say("Select a sample to read it")).classes("text-sm opacity-70")
                return
            filled = {name: value for name, value in row.items() if value not in (None, "")}
            short = {name: as_text(value) for name, value in filled.items() if is_short(value)}
            with ui.row().classes("gap-x-6 gap-y-1"):
                for name, text in short.items():
                    with ui.row().classes("gap-1 items-baseline"):
                        ui.label(name).classes("text-xs opacity-70")
                        ui.label(text).classes("text-sm font-medium")
            for name, value in filled.items():
                if name not in short:
                    text_box(name, as_text(value))

    async def _choose_source(self, event: ValueChangeEventArguments) -> None:
        if event.value and event.value != self.state.source and self._read is not None:
            self.go(source=event.value, step=None, push=False)
            await self.show()

    def _choose_step(self, event: ValueChangeEventArguments) -> None:
        if event.value != self.state.step:
            self.go(step=event.value, push=False)
            self._draw()

    def _search(self, event: ValueChangeEventArguments) -> None:
        self.go(search=event.value or "", push=False)
        self._draw()


def text_box(name: str, text: str) -> None:
    """Create a box with a long text below its name."""
    ui.label(name).classes("text-xs opacity-70")
    box = ui.label(text).classes("w-full text-sm max-h-96 overflow-auto rounded p-2 bg-gray-100 dark:bg-gray-800")
    box.style("white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace")


def sample_sources(run_dir: Path) -> dict[str, str]:
    """Return labels of the sample files of a run, by relative path, with the newest evaluation first."""
    found = {SAMPLES_FILE: "training"} if (run_dir / SAMPLES_FILE).is_file() else {}
    logs = {path: path.parent.parent.name for path in (run_dir / "eval").glob("eval_step_*/qa_logs/*_qa.jsonl")}
    newest_first = sorted(sorted(logs), key=lambda path: (len(logs[path]), logs[path]), reverse=True)
    for path in newest_first:
        step, dataset = path.parent.parent.name.removeprefix("eval_step_"), path.name.removesuffix("_qa.jsonl")
        found[str(path.relative_to(run_dir))] = f"{dataset} · step {step}"
    return found


def read_samples(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the samples at the end of a file, newest first, and whether there are older ones."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - SAMPLES_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return [], False
    rows = []
    for line in lines:
        try:
            row = orjson.loads(line)
        except ValueError:  # the first line may be truncated, and the last one incomplete
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows[::-1], size > SAMPLES_BYTES


def sample_columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the columns of the list: short ones for sorting, then the first long texts."""
    names = dict.fromkeys(name for row in rows for name in row)
    filled = [name for name in names if any(row.get(name) is not None for row in rows)]
    short = [name for name in filled if all(is_short(row.get(name)) for row in rows)]
    ordered = [name for name in FIRST_COLUMNS if name in short]
    ordered += [name for name in short if name not in ordered and name not in ("attempt", "id")]
    long = [name for name in filled if name not in short]
    return ordered[:MAX_SHORT_COLUMNS] + long[:MAX_LONG_COLUMNS]


def is_short(value: Any) -> bool:
    """Whether a value of a sample fits into a short column."""
    return not isinstance(value, (dict, list)) and len(as_text(value)) <= SHORT_CHARACTERS


def as_text(value: Any) -> str:
    """Convert a value of a sample to text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def as_cell(value: Any) -> Any:
    """Convert a value for the list, where numbers sort as numbers."""
    if isinstance(value, (bool, int)) or value is None:
        return value
    return round(value, 4) if isinstance(value, float) else clip(as_text(value).replace("\n", " "), 40)
