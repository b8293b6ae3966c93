"""What is known of an evaluated model, as `metrics.json` holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval_pipeline.figures.intervals import Intervals
from eval_pipeline.figures.summary import Figures

_INTERVALS = "intervals"


@dataclass(frozen=True)
class DatasetResult:
    """One model on one data set.

    Attributes:
        figures: of `summarize`.
        intervals: of `rate_intervals`.
        tier: of the data set.
        protocol: how answers were drawn and judged, as plain JSON; models are compared under one protocol.
        isolation: sandbox level of the judge.
        seconds: wall-clock seconds by phase.
    """

    figures: Figures
    intervals: Intervals
    tier: int
    protocol: Mapping[str, Any]
    isolation: str
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_api_errors(self) -> int:
        """Answers without a verdict, because the engine or the judge failed; the result is incomplete if there are any.

        They count as answers that are not right, so that rates are lower than those of the model.
        """
        num_answers = (self.figures["num_problems"] or 0) * (self.figures.get("num_samples") or 1)
        return round((self.figures.get("api_error_rate") or 0.0) * num_answers)

    def rate(self, metric: str) -> float:
        """A figure that has an interval, and so a value."""
        value = self.figures[metric]
        assert value is not None
        return value


@dataclass(frozen=True)
class EvaluatedModel:
    """One model on all data sets that it has been evaluated on.

    Attributes:
        label: `step_<N>`, or the model's name.
        step: optimizer step of the checkpoint; None for a model that no run saved.
        checkpoint: its directory.
        export: the Hugging Face directory that was loaded, or the name that a server knows the model by.
        weights: digest of the weights that answered.
        datasets: result by name of the data set.
    """

    label: str
    step: int | None
    checkpoint: Path
    export: str
    weights: str
    datasets: Mapping[str, DatasetResult]

    @property
    def saved_at(self) -> int:
        """The step; asked only of a model that a run saved."""
        assert self.step is not None
        return self.step

    @property
    def incomplete(self) -> dict[str, int]:
        """The data sets with incomplete results, and how many answers have no verdict."""
        return {name: result.num_api_errors for name, result in self.datasets.items() if result.num_api_errors}

    def to_json(self) -> dict[str, Any]:
        """Content of `metrics.json`: each data set's figures with their intervals, then how they came about.

        `incomplete` holds the number of answers without a verdict of each data set that has any.
        """
        results = self.datasets.items()
        return {
            "label": self.label,
            "step": self.step,
            "checkpoint": str(self.checkpoint),
            "export": self.export,
            "weights": self.weights,
            "datasets": {name: figures_with_intervals(result) for name, result in results},
            "incomplete": self.incomplete,
            "tier": {name: result.tier for name, result in results},
            "protocol": {name: dict(result.protocol) for name, result in results},
            "isolation": {name: result.isolation for name, result in results},
            "seconds": {name: dict(result.seconds) for name, result in results},
        }

    @staticmethod
    def of_json(content: Mapping[str, Any]) -> EvaluatedModel:
        """Inverse of `to_json`.

        Raises:
            KeyError: a key is missing, as in what another version wrote.
            TypeError: a value has another type.
        """
        names = {key: _typed(content[key], str) for key in ("label", "checkpoint", "export", "weights")}
        return EvaluatedModel(
            label=names["label"],
            step=_typed(content["step"], int, type(None)),
            checkpoint=Path(names["checkpoint"]),
            export=names["export"],
            weights=names["weights"],
            datasets={name: _result_of(content, name) for name in _typed(content["datasets"], dict)},
        )


def figures_with_intervals(result: DatasetResult) -> dict[str, Any]:
    """The figures of a data set and, under `intervals`, a list of low and high for each that has one."""
    return {**result.figures, _INTERVALS: {name: list(bounds) for name, bounds in result.intervals.items()}}


def _result_of(content: Mapping[str, Any], name: str) -> DatasetResult:
    figures = dict(_typed(content["datasets"][name], dict))
    intervals = {
        metric: (float(low), float(high)) for metric, (low, high) in _typed(figures.pop(_INTERVALS), dict).items()
    }
    for value in figures.values():
        _typed(value, int, float, type(None))
    if not _typed(figures["num_problems"], int) or not intervals.keys() <= figures.keys():
        raise TypeError("figures of no problems, or an interval of no figure")
    return DatasetResult(
        figures,
        intervals,
        tier=_typed(content["tier"][name], int),
        protocol=_typed(content["protocol"][name], dict),
        isolation=_typed(content["isolation"][name], str),
        seconds={phase: _typed(value, int, float) for phase, value in _typed(content["seconds"][name], dict).items()},
    )


def _typed(value: Any, *types: type) -> Any:
    if not isinstance(value, types):
        raise TypeError(f"{value!r} is of another type")
    return value
