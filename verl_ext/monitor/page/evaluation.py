"""Evaluated checkpoints: rates with their intervals, what the answers came to, the best one."""

from __future__ import annotations

import json
from typing import Any

import orjson
from nicegui import ui

from verl_ext.checkpoint.manifest import BEST
from verl_ext.files import parse_json
from verl_ext.monitor.options import errors_option, rates_option
from verl_ext.monitor.page.context import PageContext
from verl_ext.monitor.view import RunView

RATES = ("accepted_at_1", "exec_success_rate")
ERRORS = ("success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error")
Figures = dict[int, dict[str, Any]]


class EvaluationPanel:
    """Builds itself where it is made.

    Args:
        context: of the page.
    """

    def __init__(self, context: PageContext) -> None:
        self._context, self._shown = context, ""
        self._box = ui.column().classes("w-full")

    def show(self, view: RunView) -> None:
        """Draw, where something has changed."""
        by_dataset, best = evaluations(self._context, view), best_step(view)
        state = json.dumps([view.run, best, by_dataset, self._context.dark], default=str)
        if state == self._shown:
            return
        self._shown = state
        self._box.clear()
        with self._box:
            if not by_dataset:
                ui.label(self._context.say("Nothing yet")).classes("opacity-70")
            for dataset, figures in by_dataset.items():
                self._draw(dataset, figures, best)

    def _draw(self, dataset: str, figures: Figures, best: int | None) -> None:
        say, dark, steps = self._context.say, self._context.dark, sorted(figures)
        told = f" ({say('best')}: {best})" if best is not None else ""
        ui.label(f"{dataset}{told}").classes("text-lg").props('data-testid="dataset"')
        with ui.element("div").classes("w-full grid grid-cols-1 lg:grid-cols-2 gap-4"):
            rates = {
                name: [_rate(figures[step], name) for step in steps] for name in RATES if name in figures[steps[-1]]
            }
            with ui.card():
                ui.label(say("Rates by step"))
                ui.echart(rates_option(steps, rates, best, dark)).classes("w-full h-72").props(
                    'data-testid="chart rates"'
                )
            shares = {name: [figures[step].get(f"{name}_rate", 0.0) for step in steps] for name in ERRORS}
            with ui.card():
                ui.label(say("Error types"))
                ui.echart(errors_option(steps, shares, dark)).classes("w-full h-72").props('data-testid="chart errors"')


def evaluations(context: PageContext, view: RunView) -> dict[str, Figures]:
    """Figures by data set and step."""
    query = "SELECT dataset, step, figures FROM evaluations WHERE run = ? ORDER BY dataset, step"
    found: dict[str, Figures] = {}
    for dataset, step, figures in context.connection.execute(query, (view.run,)):
        found.setdefault(dataset, {})[step] = orjson.loads(figures)
    return found


def best_step(view: RunView) -> int | None:
    """Step of the chosen checkpoint; None where none is chosen."""
    try:
        return int(parse_json((view.directory / BEST).read_bytes())["step"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None


def _rate(figures: dict[str, Any], name: str) -> tuple[float, float, float]:
    value = figures.get(name, 0.0)
    low, high = figures.get("intervals", {}).get(name, (value, value))
    return value, low, high
