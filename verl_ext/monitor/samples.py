"""The tab Samples: browser for logged completions and evaluated answers."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from nicegui import run as background
from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from verl_ext.metrics.jsonl import SAMPLES_FILE
from verl_ext.monitor.panels import Panel, columns_of, data_table, heading, tag
from verl_ext.monitor.run_files import stamp_of
from verl_ext.monitor.sample_rows import (
    Group,
    Row,
    as_cell,
    as_text,
    group_cells,
    groups_of,
    is_short,
    key_of_sample,
    matches,
    read_samples,
    reward_of,
    rows_by_key,
    sample_columns,
    sample_sources,
    values_of,
)
from verl_ext.monitor.sample_tokens import DIFFERENCE, MASK, draw_tokens, num_pages, read_tokens

ROW_KEY = "__row"
"""Key of a sample or group in the list; not `id`, because samples may have such a column."""
MAX_SAMPLES = 1000
"""Maximum number of samples in the list; a search covers all samples that were read."""
MAX_CARDS = 64
"""Maximum number of samples side by side, the newest ones."""
TEXTS = ("prompt", "answer", "message", "reference")
"""Columns that are shown in a box even if they are short."""
ALL_CARDS = ("step", "attempt", "split", "sample_id", "problem_id", "prompt", "reference")
"""Columns that are the same in all samples of a group, or in the titles of their cards."""


class SamplesPanel(Panel):
    """Browser for `samples.jsonl` and the evaluations' `qa_logs`: a list, and the selected sample or group in full."""

    period_s = 3.0

    def build(self) -> None:
        """Create the controls, the list and the card of the selected sample."""
        self._read: tuple[Path, str] | None = None
        self._is_cut = False
        self._shown_key = ""
        self._samples: list[Row] = []
        self._listed: dict[str, Row | Group] = {}  # what passes the filters, by key of the list
        self._shown_group: Group | None = None
        with ui.row().classes("w-full items-center gap-4"):
            self._build_filters()
            grouped = ui.switch(self.say("Side by side"), value=self.state.grouped)
            tag(grouped, "sample groups").on_value_change(lambda event: self.go(grouped=event.value, sample=""))
            self._note = tag(ui.label().classes("text-xs opacity-70"), "sample note")
        columns = 1 if self.state.grouped else 5
        with ui.element("div").classes(f"w-full grid grid-cols-1 lg:grid-cols-{columns} gap-4 items-start"):
            self._table = data_table("samples", [], ROW_KEY, self.say, selection="single", pagination=20)
            self._table.classes("[&_.q-table--col-auto-width]:hidden cursor-pointer")
            self._table.props("hide-selected-banner tabindex=0", remove="wrap-cells").on("row-click", self._select)
            self._detail = tag(ui.card().classes("w-full p-3 gap-3").props("flat bordered"), "sample")
            if not self.state.grouped:
                self._table.classes("lg:col-span-3")
                self._detail.classes("lg:col-span-2")
        self._show_sample(None)

    def _build_filters(self) -> None:
        """Create the selectors; each changes an attribute of the page's state."""
        self._selects = {
            attribute: tag(
                ui.select({}, label=self.say(label)).classes(f"grow sm:grow-0 {width}"), f"sample {attribute}"
            )
            for attribute, label, width in (
                ("source", "Source", "min-w-56"),
                ("split", "Split", "min-w-28"),
                ("step", "Step", "min-w-28"),
                ("error", "Error type", "min-w-36"),
            )
        }
        for attribute, select in self._selects.items():
            select.on_value_change(lambda event, attribute=attribute: self._filter(attribute, event.value))
        self._rewards = {
            attribute: ui.number(self.say(label), value=getattr(self.state, attribute)).classes("w-28")
            for attribute, label in {"reward_from": "Reward from", "reward_to": "Reward to"}.items()
        }
        for attribute, number in self._rewards.items():
            tag(number.props("clearable debounce=300"), attribute.replace("_", " "))
            number.on_value_change(lambda event, attribute=attribute: self._filter(attribute, event.value))
        search = ui.input(self.say("Search"), value=self.state.search).props("clearable debounce=300")
        tag(search.classes("w-full sm:w-56"), "sample search")
        search.on_value_change(lambda event: self._filter("search", event.value or ""))

    async def show(self) -> None:
        """Read the chosen file in a thread if it has changed."""
        run = self.run
        if run is None:
            return
        directory = self.follower.directory(run)
        sources = sample_sources(directory)
        chosen = self.state.source if self.state.source in sources else next(iter(sources), "")
        labels = {name: self.say("training") if name == SAMPLES_FILE else label for name, label in sources.items()}
        self._offer("source", labels, chosen or None)
        try:
            read = (directory / chosen, stamp_of(directory / chosen)) if chosen else None
        except OSError:
            return
        if read != self._read:
            found = ([], False) if read is None else await self._read_file(*read)
            if found is not None:
                self._samples, self._is_cut = found
                self._read = read
                self.redraw()
                await self._show_sample_of_address()

    async def _read_file(self, path: Path, stamp: str) -> tuple[list[dict[str, Any]], bool]:
        return await background.io_bound(self.follower.files.get, ("samples", path), stamp, partial(read_samples, path))

    def redraw(self) -> None:
        """List the samples, or the groups with a sample, that pass the filters."""
        self._offer_values()
        if self.state.grouped:
            chosen = {id(row) for row in self._samples if matches(row, self.state)}
            groups = [each for each in groups_of(self._samples) if any(id(row) in chosen for row in each.rows)]
            self._listed = {each.key: each for each in groups}
            cells = list(map(group_cells, groups[:MAX_SAMPLES]))
            names = [name for name in (cells[0] if cells else ()) if any(row[name] not in (None, "") for row in cells)]
            rows = [row | {ROW_KEY: group.key} for group, row in zip(groups, cells)]
            self._show_group(next((each for each in groups if each.key == self.state.sample), None))
        else:
            found = {key: row for key, row in rows_by_key(self._samples).items() if matches(row, self.state)}
            self._listed = {**found}
            names = sample_columns([*found.values()])
            rows = [
                {name: as_cell(row.get(name)) for name in names} | {ROW_KEY: key}
                for key, row in islice(found.items(), MAX_SAMPLES)
            ]
        num_found = len(self._listed)
        self._table.columns = columns_of(names, self.say)
        self._table.rows = rows
        notes = [self.say("Only the newest samples of the file are shown")] if self._is_cut else []
        if num_found > MAX_SAMPLES:
            text = self.say("The newest {} of {} are listed; filter or search to find others")
            notes.append(text.format(f"{MAX_SAMPLES:,}", f"{num_found:,}"))
        self._note.set_text(" · ".join(notes))

    def _offer_values(self) -> None:
        """Offer the values of the samples in the selectors; a selector without a choice is hidden."""
        steps = sorted({row["step"] for row in self._samples if isinstance(row.get("step"), int)})
        for attribute, every, values in (
            ("step", "All steps", steps),
            ("split", "All", values_of(self._samples, "split")),
            ("error", "All", values_of(self._samples, "error_type")),
        ):
            chosen = getattr(self.state, attribute)
            nothing = None if attribute == "step" else ""
            options = {nothing: self.say(every), **{value: as_text(value) for value in values}}
            self._offer(attribute, options, chosen if chosen in options else nothing)
            self._selects[attribute].set_visibility(len(values) > 1 or chosen in values)
        has_rewards = any(reward_of(row) is not None for row in self._samples)
        for number in self._rewards.values():
            number.set_visibility(has_rewards)

    def _offer(self, attribute: str, options: dict[Any, str], value: object) -> None:
        select = self._selects[attribute]
        if options != select.options or select.value != value:
            select.set_options(options, value=value)

    async def _filter(self, attribute: str, value: Any) -> None:
        """Apply a control's value; the panel itself sets values too, which change nothing."""
        if self._read is None or value == getattr(self.state, attribute):
            return
        if attribute != "source":
            self.change(**{attribute: value})
        elif value and value != self._selected_source:
            self.go(source=value, step=None, split="", error="", sample="", push=False)
            await self.show()

    @property
    def _selected_source(self) -> str:
        """The source whose samples are shown."""
        run = self.run
        return "" if run is None or self._read is None else str(self._read[0].relative_to(self.follower.directory(run)))

    async def _select(self, event: GenericEventArguments) -> None:
        shown = event.args[1]
        found = self._listed.get(shown[ROW_KEY])
        if found is None:  # it no longer passes the filters
            return
        self._table.selected = [shown]
        if isinstance(found, Group):
            self.go(sample=found.key, push=False)
            self._show_group(found)
        else:
            self.go(sample=key_of_sample(found), push=False)
            await self._open(found)

    async def _show_sample_of_address(self) -> None:
        """Show the selected sample of a link or of a reloaded page in the list."""
        key = self.state.sample
        if self.state.grouped or not key or key == self._shown_key:
            return
        found = rows_by_key(self._samples).items()
        shown, sample = next(((name, row) for name, row in found if key_of_sample(row) == key), (None, None))
        if sample is not None:
            self._table.selected = [row for row in self._table.rows if row[ROW_KEY] == shown]
            await self._open(sample)

    async def _open(self, row: Row) -> None:
        self._shown_key = key_of_sample(row)
        self._show_sample(row)
        await self._show_tokens(row)

    def _show_sample(self, row: Row | None) -> None:
        """Show all fields of a sample as text."""
        self._detail.clear()
        with self._detail:
            if row is None:
                ui.label(self.say("Select a sample to read it")).classes("text-sm opacity-70")
            else:
                draw_fields(row)

    async def _show_tokens(self, row: Row) -> None:
        """Show the tokens of a sample below its fields, if the run has logged them."""
        if self._read is None or self._selected_source != SAMPLES_FILE:
            return
        tokens = await background.io_bound(read_tokens, self._read[0].parent, row)
        if not tokens:
            return
        with self._detail:
            kinds = {DIFFERENCE: self.say("Log-probabilities"), MASK: self.say("Loss mask")}
            with ui.row().classes("items-center gap-3"):
                ui.label(self.say("Tokens")).classes("text-xs opacity-70")
                toggle = tag(ui.toggle(kinds, value=MASK if self.state.colors == MASK else DIFFERENCE), "token colors")
                toggle.props("dense no-caps unelevated")
                pages = tag(ui.pagination(1, num_pages(tokens), direction_links=True), "token pages")
                pages.props("max-pages=5").set_visibility(num_pages(tokens) > 1)
            box = ui.column().classes("w-full gap-2")

        def draw() -> None:
            box.clear()
            with box:
                draw_tokens(tokens, pages.value or 1, self.state.colors, self.say)

        def choose(event: ValueChangeEventArguments) -> None:
            self.go(colors=event.value, push=False)
            draw()

        toggle.on_value_change(choose)
        pages.on_value_change(draw)
        draw()

    def _show_group(self, group: Group | None) -> None:
        """Show the samples of a group side by side, below their prompt, unless they are shown already."""
        if group == self._shown_group:
            return
        self._shown_group = group
        if group is None:
            self._show_sample(None)
            return
        self._detail.clear()
        with self._detail:
            heading(group.key)
            shared = {name: group.rows[0].get(name) for name in ("prompt", "reference")}
            draw_fields(shared)
            with tag(ui.row().classes("w-full no-wrap overflow-x-auto items-start gap-3"), "group"):
                for row in group.rows[-MAX_CARDS:]:
                    with ui.card().classes("min-w-64 max-w-lg grow basis-0 p-3 gap-2").props("flat bordered"):
                        title = f"{self.say('Step').lower()} {as_text(row['step'])}" if "step" in row else ""
                        ui.label(title).classes("font-medium")
                        draw_fields(row, omitted=ALL_CARDS)


def draw_fields(row: Row, omitted: Collection[str] = ()) -> None:
    """Create the texts of a sample: short values in one line, then a box for each long one."""
    filled = {name: value for name, value in row.items() if value not in (None, "") and name not in omitted}
    short = {name: as_text(value) for name, value in filled.items() if is_short(value) and name not in TEXTS}
    with ui.row().classes("gap-x-6 gap-y-1"):
        for name, text in short.items():
            with ui.row().classes("gap-1 items-baseline"):
                ui.label(name).classes("text-xs opacity-70")
                ui.label(text).classes("text-sm font-medium")
    for name, value in filled.items():
        if name not in short:
            text_box(name, as_text(value))


def text_box(name: str, text: str) -> None:
    """Create a box with a long text below its name."""
    ui.label(name).classes("text-xs opacity-70")
    box = ui.label(text).classes("w-full text-sm max-h-96 overflow-auto rounded p-2 bg-gray-100 dark:bg-gray-800")
    box.style("white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace")
