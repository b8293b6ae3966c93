"""The state of one open page: its address, and the preferences of the browser."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qs, urlencode

from verl_ext.monitor.curves import AXES
from verl_ext.monitor.text import LANGUAGES, translate

TABS = ("Training", "Evaluation", "Compare", "Checkpoints", "Samples", "Health", "Log", "Configuration")
OF_RUN_TEXTS = (
    *("source", "split", "error", "sample", "colors", "search", "dataset", "a", "b", "problem"),
    *("log_source", "log_search", "setting_search", "changed"),
)
OF_TABLE_TEXTS = ("filter", "sort")
OF_RUN: dict[str, Any] = dict.fromkeys(OF_RUN_TEXTS, "") | dict.fromkeys(("step", "reward_from", "reward_to"))
"""Defaults of the attributes that make no sense for another run."""
DEFAULT_SMOOTHING = 0.6
MAX_SMOOTHING = 0.99
MAX_COMPARED = 10
"""Maximum number of runs in one chart."""


@dataclass
class PageState:
    """The state of a page; its address has everything except the preferences, so that Back, reload and links work.

    Attributes:
        run: path of the shown run; empty for the run table, or for a comparison.
        tab: one of `TABS`.
        runs: paths of compared runs, of which the first `MAX_COMPARED` that exist are shown.
        metrics: compared metrics.
        smoothing: weight of `curves.smooth`; 0 for none.
        rates: shown rates of evaluated checkpoints; empty for the default.
        axis: quantity on the x-axis, one of `curves.AXES`.
        log_charts: names of the charts with a logarithmic axis.
        source: file of the shown samples; empty for the first.
        step: step of the shown samples; None for all.
        split: train or eval, of the shown samples; empty for both.
        error: error type of the shown samples; empty for all.
        reward_from: lowest reward of the shown samples; None for no limit.
        reward_to: highest reward of the shown samples; None for no limit.
        search: text that the shown samples contain.
        grouped: whether the samples of a prompt are shown side by side.
        sample: key of the shown sample or group of samples; empty for none.
        colors: mask for tokens colored by the loss mask; empty for the difference of log-probabilities.
        dataset: dataset whose flipped problems are shown; empty for the first.
        a: label of the evaluation that is compared; empty for the base model, or the first.
        b: label of the evaluation that it is compared with; empty for the best.
        problem: flipped problem whose answers are shown; empty for none.
        log_source: console, or empty for the events.
        log_search: text that the shown lines of the log contain.
        setting_search: text that the shown settings contain.
        changed: 1 to show only settings that were changed; empty for all.
        filter: text that the rows of the run table contain.
        sort: column by which the run table is sorted, with a minus for descending order; empty for none.
        preferences: language (en or zh), dark and fold; the browser stores them for new pages.
    """

    run: str = ""
    tab: str = TABS[0]
    runs: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    smoothing: float = DEFAULT_SMOOTHING
    rates: tuple[str, ...] = ()
    axis: str = AXES[0]
    log_charts: tuple[str, ...] = ()
    source: str = ""
    step: int | None = None
    split: str = ""
    error: str = ""
    reward_from: float | None = None
    reward_to: float | None = None
    search: str = ""
    grouped: bool = False
    sample: str = ""
    colors: str = ""
    dataset: str = ""
    a: str = ""
    b: str = ""
    problem: str = ""
    log_source: str = ""
    log_search: str = ""
    setting_search: str = ""
    changed: str = ""
    filter: str = ""
    sort: str = ""
    preferences: MutableMapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_query(cls, query: str, preferences: MutableMapping[str, Any] | None = None) -> Self:
        """Decode the state from an address; invalid values become defaults."""
        values = parse_qs(query.removeprefix("?"), errors="replace")
        first = {name: found[0] for name, found in values.items()}
        tab, step = first.get("tab", ""), first.get("step", "")
        return cls(
            run=first.get("run", ""),
            tab=tab if tab in TABS else TABS[0],
            runs=tuple(dict.fromkeys(values.get("runs", ()))),
            metrics=tuple(dict.fromkeys(values.get("metric", ()))),
            smoothing=_smoothing(first.get("smoothing", "")),
            rates=tuple(dict.fromkeys(values.get("rate", ()))),
            axis=axis if (axis := first.get("axis", "")) in AXES else AXES[0],
            log_charts=tuple(dict.fromkeys(values.get("log", ()))),
            step=int(step) if step.isascii() and step.isdigit() and len(step) < 16 else None,
            reward_from=_number(first.get("reward_from", "")),
            reward_to=_number(first.get("reward_to", "")),
            grouped=first.get("grouped") == "1",
            **{name: first.get(name, "") for name in OF_RUN_TEXTS + OF_TABLE_TEXTS},
            preferences={} if preferences is None else preferences,
        )

    def to_query(self) -> str:
        """Encode the state as a relative address, without defaults."""
        pairs: list[tuple[str, Any]] = [("run", self.run)] if self.run else []
        pairs += [("tab", self.tab)] if self.tab != TABS[0] else []
        pairs += [("runs", path) for path in self.runs]
        pairs += [("metric", name) for name in self.metrics]
        pairs += [("smoothing", f"{self.smoothing:g}")] if self.smoothing != DEFAULT_SMOOTHING else []
        pairs += [("rate", name) for name in self.rates]
        pairs += [("axis", self.axis)] if self.axis != AXES[0] else []
        pairs += [("log", name) for name in self.log_charts]
        pairs += [("step", self.step)] if self.step is not None else []
        rewards = {"reward_from": self.reward_from, "reward_to": self.reward_to}
        pairs += [(name, f"{value:g}") for name, value in rewards.items() if value is not None]
        pairs += [("grouped", "1")] if self.grouped else []
        names = OF_RUN_TEXTS if self.run or self.runs else OF_RUN_TEXTS + OF_TABLE_TEXTS
        pairs += [(name, value) for name in names if (value := getattr(self, name))]
        return f"?{urlencode(pairs)}" if pairs else "."

    @property
    def language(self) -> str:
        """en or zh."""
        language = self.preferences.get("language")
        return language if language in LANGUAGES else "en"

    @property
    def dark(self) -> bool:
        """Whether the page is dark."""
        return bool(self.preferences.get("dark", False))

    def translate(self, text: str) -> str:
        """Translate a text to the page's language."""
        return translate(self.language, text)


def _smoothing(text: str) -> float:
    value = _number(text)
    return DEFAULT_SMOOTHING if value is None else min(max(value, 0.0), MAX_SMOOTHING)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
