"""The tab Evaluation: charts of the evaluated checkpoints, and the problems that flipped between two of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from nicegui import run as background
from nicegui import ui
from nicegui.events import GenericEventArguments, ValueChangeEventArguments

from verl_ext.checkpoint.manifest import step_of
from verl_ext.checkpoint.retention import read_best_file
from verl_ext.metrics.jsonl import parse_object
from verl_ext.monitor.panels import (
    EvaluationPanel,
    Panel,
    columns_of,
    data_table,
    differing_keys,
    flatten,
    heading,
    tag,
)
from verl_ext.monitor.run_files import is_utf8, stamp_of
from verl_ext.monitor.samples import text_box
from verl_ext.significance import paired_test

SOLVED = "success"
"""Error type of an answer that passes all tests."""
OUTCOMES = {
    "Gained": "solved by B only",
    "Lost": "solved by A only",
    "Both": "solved by both",
    "Neither": "solved by neither",
}
"""Label and meaning of each count."""
MAX_SHOWN_KEYS = 3
"""Maximum number of differing settings in the refusal to compare."""
LINK = """<q-td :props="props"><a :href="props.row.href"
  @click.exact.prevent="() => $parent.$emit('open', props.row.key)">{{ props.value }}</a></q-td>"""


# Files


@dataclass(frozen=True)
class Evaluation:
    """One evaluated model of a run.

    Attributes:
        label: name of its directory without `eval_`, such as `step_40`.
        step: step of the checkpoint; None for the base model.
        directory: its results.
        protocols: how answers were generated and judged, by dataset that has verdicts.
    """

    label: str
    step: int | None
    directory: Path
    protocols: Mapping[str, Mapping[str, Any]]


class AnswerKey(NamedTuple):
    """Identifies an answer within a dataset; the text is its name in the address."""

    problem_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.problem_id} #{self.sample}" if self.sample else self.problem_id


Row = Mapping[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The answers of model B compared with those of model A.

    Attributes:
        counts: answers by key of `OUTCOMES`.
        p_value: two-sided, of `test`.
        test: name of the paired test over problems.
        flips: verdicts of A and of B where only one of them is solved, lost ones first.
    """

    counts: Mapping[str, int]
    p_value: float
    test: str
    flips: Mapping[AnswerKey, tuple[Row, Row]]


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations of a run: the base model, then checkpoints by step. Unreadable ones are omitted."""
    found = []
    for path in (run_dir / "eval").glob("eval_*/metrics.json"):
        try:
            if is_utf8(path.relative_to(run_dir)):
                found.append(_read_evaluation(path, stamp_of(path)))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda each: (each.step is not None, each.step or 0, each.label))


@lru_cache(maxsize=1024)
def _read_evaluation(path: Path, stamp: str) -> Evaluation:
    content = orjson.loads(path.read_bytes())
    content = content if isinstance(content, dict) else {}
    step, protocols = content.get("step"), content.get("protocol")
    protocols = protocols if isinstance(protocols, dict) else {}
    judged = [each.stem for each in (path.parent / "verdicts").glob("*.jsonl") if is_utf8(Path(each.name))]
    # in the order of the evaluation; names come from the directory, because those in the file may be paths
    datasets = sorted(judged, key=lambda name: (list(protocols).index(name) if name in protocols else math.inf, name))
    return Evaluation(
        path.parent.name.removeprefix("eval_"),
        step if isinstance(step, int) else None,
        path.parent,
        {name: found if isinstance(found := protocols.get(name), dict) else {} for name in datasets},
    )


def compare(a: Evaluation, b: Evaluation, dataset: str) -> Comparison:
    """Compare two evaluations answer by answer.

    Raises:
        OSError: the verdicts of one cannot be read.
    """
    paths = [each.directory / "verdicts" / f"{dataset}.jsonl" for each in (a, b)]
    return _compare(*paths, *map(stamp_of, paths))


@lru_cache(maxsize=64)
def _compare(path_a: Path, path_b: Path, stamp_a: str, stamp_b: str) -> Comparison:
    a, b = ({key_of(row): row for row in json_rows(path)} for path in (path_a, path_b))
    groups: dict[str, list[AnswerKey]] = {name: [] for name in OUTCOMES}
    names = {(False, True): "Gained", (True, False): "Lost", (True, True): "Both", (False, False): "Neither"}
    for key in [key for key in a if key in b]:
        groups[names[_is_solved(a[key]), _is_solved(b[key])]].append(key)
    return Comparison(
        {name: len(keys) for name, keys in groups.items()},
        *_paired_test(groups),
        {key: (a[key], b[key]) for name in ("Lost", "Gained") for key in groups[name]},
    )


def _paired_test(groups: Mapping[str, Sequence[AnswerKey]]) -> tuple[float, str]:
    """Return the p-value and the name of the test that the evaluation's report uses."""
    changes = {"Gained": 1, "Lost": -1, "Both": 0, "Neither": 0}
    by_problem = defaultdict(list)
    for name, keys in groups.items():
        for key in keys:
            by_problem[key.problem_id].append(changes[name])
    differences = np.array([np.mean(each) for each in by_problem.values()])
    return paired_test(differences, max(map(len, by_problem.values()), default=1))


def read_answer(evaluation: Evaluation, dataset: str, key: AnswerKey) -> Row | None:
    """Return an answer with its prompt and message; None if the evaluation has not kept it."""
    for name in (f"answers/{dataset}.jsonl", f"qa_logs/{dataset}_qa.jsonl"):
        try:
            for row in json_rows(evaluation.directory / name):
                if key_of(row) == key:
                    return row
        except OSError:
            continue
    return None


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of a JSON Lines file one by one, without lines that cannot be parsed.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        yield from (row for line in file if (row := parse_object(line)) is not None)


def key_of(row: Row) -> AnswerKey:
    """Return the key of a row of verdicts or answers."""
    sample = row.get("sample")
    return AnswerKey(str(row.get("problem_id")), sample if isinstance(sample, int) else 0)


def _is_solved(row: Row) -> bool:
    return row.get("error_type") == SOLVED


# Panels


class EvaluationTab(Panel):
    """Charts of the evaluated checkpoints, and below them the flipped problems."""

    period_s = 3.0

    def build(self) -> None:
        """Create both parts."""
        self._parts = [kind(self.follower, self.state, self.go) for kind in (EvaluationPanel, FlipsPanel)]

    async def show(self) -> None:
        """Update both parts."""
        for part in self._parts:
            await part.show()


class FlipsPanel(Panel):
    """Problems that only one of two models solves, and both answers of a selected one."""

    def build(self) -> None:
        """Create the selectors, the table and the place of the answers."""
        self._shown: object = None
        self._pair: tuple[Evaluation, Evaluation] | None = None
        self._comparison: Comparison | None = None
        self._box = ui.column().classes("w-full")
        with self._box:
            heading(self.say("Flipped problems"), "text-lg mt-2")
            with ui.row().classes("w-full items-center gap-4"):
                self._selects = {
                    name: tag(
                        ui.select([], label=self.say(label)).classes("grow sm:grow-0 sm:min-w-48"), f"flips {name}"
                    )
                    for name, label in {"dataset": "Dataset", "a": "Model A", "b": "Model B"}.items()
                }
            for name, select in self._selects.items():
                select.on_value_change(lambda event, name=name: self._choose(name, event))
            self._summary = tag(ui.row().classes("w-full items-center gap-x-6 gap-y-1"), "flips summary")
            columns = columns_of(("Problem", "A", "B", "Tests passed"), self.say)
            options: dict[str, Any] = {"templates": {"body-cell-Problem": LINK}, "pagination": 10}
            self._table = data_table("flips", columns, "key", self.say, "No problem flipped", **options)
            self._table.on("open", self._open)
            self._detail = tag(ui.column().classes("w-full"), "flip")
        self._box.set_visibility(False)

    async def show(self) -> None:
        """Compare the models of the address; by default the base model, or the first one, with the best one."""
        run = self.run
        if run is None:
            return
        directory = self.follower.directory(run)
        found = await background.io_bound(read_evaluations, directory)
        datasets = list(dict.fromkeys(name for each in found or () for name in each.protocols))
        dataset = self.state.dataset if self.state.dataset in datasets else next(iter(datasets), "")
        models = {each.label: each for each in found or () if dataset in each.protocols}
        self._box.set_visibility(len(models) > 1)
        if len(models) < 2:
            return
        best = read_best_file(directory)[0]
        labels = [*models]
        best_label = next((name for name in labels if best is not None and models[name].step == step_of(best)), "")
        default = best_label if best_label != labels[0] else ""
        a, b = (
            models[chosen if chosen in models else preferred]
            for chosen, preferred in ((self.state.a, labels[0]), (self.state.b, default or labels[-1]))
        )
        names = {name: self._name(each) + (f" ({self.say('best')})" if name == best_label else "")
                 for name, each in models.items()}  # fmt: skip
        for name, options, value in (
            ("dataset", {each: each for each in datasets}, dataset),
            ("a", names, a.label),
            ("b", names, b.label),
        ):
            select = self._selects[name]
            if select.options != options or select.value != value:
                select.set_options(options, value=value)
        await self._compare(a, b, dataset)

    async def _compare(self, a: Evaluation, b: Evaluation, dataset: str) -> None:
        """Draw the comparison, unless it is shown already."""
        different = differing_keys([flatten(each.protocols[dataset]) for each in (a, b)])
        try:
            comparison = None if different else await background.io_bound(compare, a, b, dataset)
        except OSError:  # replaced at this moment
            return
        if (shown := (a, b, dataset, comparison)) == self._shown:
            return
        self._shown, self._pair, self._comparison = shown, (a, b), comparison
        self._summary.clear()
        with self._summary:
            if comparison is None:
                listed = ", ".join(
                    f"{key}: {' / '.join(values)}" for key, values in [*different.items()][:MAX_SHOWN_KEYS]
                )
                ui.label(f"{self.say('Not compared, because the protocols of A and B differ')}: {listed}")
            else:
                self._draw_counts(comparison)
        self._table.set_visibility(comparison is not None)
        self._table.rows = [] if comparison is None else [self._row(key) for key in comparison.flips]
        await self._draw_answers()

    def _draw_counts(self, comparison: Comparison) -> None:
        for name, meaning in OUTCOMES.items():
            with ui.row().classes("items-baseline gap-1"):
                tag(ui.label(f"{comparison.counts[name]}").classes("text-lg font-medium"), f"flips {name}")
                ui.label(f"{self.say(name)} ({self.say(meaning)})").classes("text-sm")
        text = f"p = {comparison.p_value:.2g} ({self.say(comparison.test)})"
        tag(ui.label(text).classes("text-sm"), "flips p")

    def _row(self, key: AnswerKey) -> dict[str, Any]:
        assert self._comparison is not None
        before, after = self._comparison.flips[key]
        return {
            "key": str(key),
            "href": replace(self.state, problem=str(key)).to_query(),
            "Problem": str(key),
            "A": str(before.get("error_type")),
            "B": str(after.get("error_type")),
            "Tests passed": f"{tests_passed(before)} → {tests_passed(after)}",
        }

    async def _draw_answers(self) -> None:
        """Show prompt, answers and messages of the problem of the address."""
        pair, comparison, dataset = self._pair, self._comparison, str(self._selects["dataset"].value)
        flips = {} if comparison is None else comparison.flips
        key = next((each for each in flips if str(each) == self.state.problem), None)
        rows: list[Row | None] = []
        if pair is not None and key is not None:
            rows = [await background.io_bound(read_answer, each, dataset, key) for each in pair]
        self._detail.clear()
        with self._detail:
            if pair is None or key is None:
                if flips:
                    ui.label(self.say("Select a problem to read both answers")).classes("text-sm opacity-70")
                return
            heading(str(key), level=4)
            prompt = next((row["prompt"] for row in rows if row is not None and row.get("prompt")), None)
            if prompt is not None:
                text_box(self.say("Prompt"), str(prompt))
            with ui.element("div").classes("w-full grid grid-cols-1 lg:grid-cols-2 gap-4"):
                for letter, evaluation, verdict, row in zip("AB", pair, flips[key], rows):
                    with tag(ui.card().classes("w-full p-3 gap-2").props("flat bordered"), f"answer {letter}"):
                        self._draw_answer(f"{letter}: {self._name(evaluation)}", verdict, row)

    def _draw_answer(self, title: str, verdict: Row, row: Row | None) -> None:
        with ui.row().classes("items-center gap-2"):
            ui.label(title).classes("font-medium")
            ui.icon("check_circle" if _is_solved(verdict) else "cancel")
            ui.label(f"{verdict.get('error_type')} · {tests_passed(verdict)} {self.say('tests passed')}")
        if row is None:
            ui.label(self.say("This evaluation has not kept the answer")).classes("text-sm opacity-70")
            return
        if row.get("message"):
            text_box(self.say("Message"), str(row["message"]))
        text_box(self.say("Answer"), str(row.get("answer")))

    def _name(self, evaluation: Evaluation) -> str:
        return evaluation.label if evaluation.step is None else f"{self.say('Step').lower()} {evaluation.step}"

    async def _choose(self, name: str, event: ValueChangeEventArguments) -> None:
        if self._pair is None or not event.value:
            return
        a, b = self._pair
        if event.value != {"dataset": self._shown_dataset, "a": a.label, "b": b.label}[name]:
            self.go(push=False, **{name: event.value, "problem": ""})
            await self.show()

    @property
    def _shown_dataset(self) -> str:
        return self._shown[2] if isinstance(self._shown, tuple) else ""

    async def _open(self, event: GenericEventArguments) -> None:
        self.go(push=False, problem=str(event.args))
        await self._draw_answers()


def tests_passed(row: Row) -> str:
    """Return the number of passed and of all tests."""
    return f"{row.get('num_passed', '-')} / {row.get('num_tests', '-')}"
