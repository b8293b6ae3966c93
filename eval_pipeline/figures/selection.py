"""The choice of the best checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eval_pipeline.figures.evaluated import DatasetResult, EvaluatedModel
from eval_pipeline.figures.intervals import Interval
from verl_ext.errors import UserError

Settings = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Choice:
    """The best checkpoint and what it was chosen by.

    Attributes:
        best: the checkpoint.
        metric: name of a figure.
        mode: whether the largest (`max`) or smallest (`min`) is best.
        datasets: data sets that the figure was taken over.
        settings: of each data set that may be taken: what of its protocol is the same for all that were compared.
        value: the figure.
        interval: its 95 % confidence interval; None where the figure is not a rate.
        values: the figure of every evaluated checkpoint by step, those that could not be chosen included; None where
            there is none.
    """

    best: EvaluatedModel
    metric: str
    mode: Literal["max", "min"]
    datasets: tuple[str, ...]
    settings: Settings
    value: float
    interval: Interval | None
    values: dict[int, float | None]


def choose_best(
    evaluated: Sequence[EvaluatedModel],
    settings: Settings,
    metric: str = "exec_success_rate",
    mode: Literal["max", "min"] = "max",
    dataset: str | None = None,
) -> Choice | None:
    """Choose among checkpoints; of equal ones the newer.

    Without `dataset` the figure is the mean over the data sets that all compared checkpoints have, each weighted by its
    number of problems, which makes a rate that of all their problems together. A checkpoint is compared if its
    directory still exists (training could not go on from another) and it was evaluated on a data set that counts.

    Args:
        evaluated: the run's checkpoints; models without a step are left out.
        settings: by name the data sets that count, each with keys and values that a result's protocol must have.
        metric: name of a figure.
        mode: whether the largest or the smallest is best.
        dataset: the one data set to choose by.

    Returns:
        The choice, or None when there is no checkpoint with a value to choose.

    Raises:
        UserError: there are figures, but none of this name.
    """
    _require_known(metric, evaluated)
    counting = {name: its for name, its in settings.items() if dataset in (None, name)}
    compared = [model for model in evaluated if _can_be_chosen(model, counting)]
    datasets = _common(compared, counting)
    if not datasets:
        return None
    values = {
        model.saved_at: _mean(model, metric, datasets) if _comparable(model, counting) >= set(datasets) else None
        for model in evaluated
        if model.step is not None
    }
    measured = {step: value for step, value in values.items() if value is not None}
    if not measured:
        return None
    sign = 1 if mode == "max" else -1
    candidates = (model for model in compared if model.step in measured)
    best = max(candidates, key=lambda model: (sign * measured[model.saved_at], model.saved_at))
    value, interval = measured[best.saved_at], _interval(best, metric, datasets)
    return Choice(best, metric, mode, datasets, settings, value, interval, values)


def _require_known(metric: str, evaluated: Sequence[EvaluatedModel]) -> None:
    known = {name for model in evaluated for result in model.datasets.values() for name in result.figures}
    if known and metric not in known:
        raise UserError(f"selection.metric is {metric!r}; use one of {', '.join(sorted(known))}")


def _can_be_chosen(model: EvaluatedModel, settings: Settings) -> bool:
    return model.step is not None and bool(_comparable(model, settings)) and model.checkpoint.is_dir()


def _comparable(model: EvaluatedModel, settings: Settings) -> set[str]:
    """Data sets on which a model was evaluated as is wanted."""
    return {
        name
        for name, result in model.datasets.items()
        if name in settings and _without_versions(settings[name]).items() <= _without_versions(result.protocol).items()
    }


def _without_versions(settings: Mapping[str, Any]) -> dict[str, Any]:
    """With the names alone of packages that programs may import: their releases are no reason not to compare."""
    packages = settings.get("packages")
    return {**settings, "packages": sorted(packages)} if isinstance(packages, Mapping) else {**settings}


def _common(models: Sequence[EvaluatedModel], settings: Settings) -> tuple[str, ...]:
    return tuple(sorted(set.intersection(*(_comparable(model, settings) for model in models)))) if models else ()


def _results(model: EvaluatedModel, datasets: Collection[str]) -> list[tuple[float, DatasetResult]]:
    """Each data set's result with its share of the problems."""
    results = [model.datasets[name] for name in datasets]
    sizes = [result.figures["num_problems"] or 0 for result in results]
    return [(size / sum(sizes), result) for size, result in zip(sizes, results)]


def _mean(model: EvaluatedModel, metric: str, datasets: Collection[str]) -> float | None:
    parts: list[float] = []
    for weight, result in _results(model, datasets):
        value = result.figures.get(metric)
        if value is None or not math.isfinite(value):
            return None
        parts.append(weight * value)
    return math.fsum(parts)


def _interval(model: EvaluatedModel, metric: str, datasets: Collection[str]) -> Interval | None:
    """Interval of the weighted mean: each data set's distances from its rate to its bounds add up as squares.

    Source:
        Zou and Donner 2008, Statistics in Medicine 27(10), the method MOVER.
    """
    results = _results(model, datasets)
    if any(metric not in result.intervals for _, result in results):
        return None
    mean = math.fsum(weight * result.rate(metric) for weight, result in results)
    below, above = (_distance(results, metric, side) for side in (0, 1))
    return mean - below, mean + above


def _distance(results: Collection[tuple[float, DatasetResult]], metric: str, side: int) -> float:
    distances = ((weight, result.rate(metric) - result.intervals[metric][side]) for weight, result in results)
    return math.sqrt(math.fsum((weight * distance) ** 2 for weight, distance in distances))
