"""Selection of the best checkpoint, and `best_checkpoint.json`, which rotation, reports and the next stage read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from eval_pipeline.report.metrics import Interval
from eval_pipeline.report.results import DatasetResult, EvaluatedModel, metrics_with_intervals, write_json
from verl_ext.checkpoint.manifest import BEST
from verl_ext.errors import UserError
from verl_ext.files import parse_json

ComparedSettings = Mapping[str, Mapping[str, Any]]
"""The part of the protocol that must be equal for results to be comparable, by dataset."""


@dataclass(frozen=True)
class SelectionResult:
    """The best checkpoint and how it was selected."""

    best: EvaluatedModel
    metric: str
    mode: Literal["max", "min"]
    """Whether the largest (`max`) or smallest (`min`) value is best."""
    datasets: tuple[str, ...]
    """Datasets over which the metric was averaged."""
    settings: ComparedSettings
    """Settings of each dataset that may count."""
    value: float
    """The best checkpoint's metric."""
    interval: Interval | None
    """The 95% confidence interval of `value`; None if the metric is not a rate."""
    values: dict[int, float | None]
    """The metric of every evaluated checkpoint by step, even if it could not be selected; None without a value."""
    partial: tuple[str, ...]
    """Labels of existing checkpoints that were not compared, because they lack results on some of `datasets`."""


def select_best(
    evaluated: Sequence[EvaluatedModel],
    settings: ComparedSettings,
    metric: str = "exec_success_rate",
    mode: Literal["max", "min"] = "max",
    dataset: str | None = None,
) -> SelectionResult | None:
    """Select the best checkpoint; in a tie, the newest.

    Without `dataset`, the metric is the mean over the datasets that count, weighted by number of problems; the mean of
    a rate is the rate over all problems. A checkpoint is compared if it was evaluated on all of them and its directory
    still exists, so that training can continue from it. If there is none, all existing checkpoints with results are
    compared on the datasets that they share.

    Args:
        evaluated: the run's checkpoints; models without a step are skipped.
        settings: the datasets that count.
        mode: whether the largest or the smallest value is best.
        dataset: select by this dataset only.

    Returns:
        The selection; None if no checkpoint has a value.

    Raises:
        UserError: there are results, but none has the metric.
    """
    known = {name for model in evaluated for result in model.datasets.values() for name in result.metrics}
    if known and metric not in known:
        raise UserError(f"selection.metric is {metric!r}; use one of {', '.join(sorted(known))}")
    counting = {name: its for name, its in settings.items() if dataset in (None, name)}
    comparable = [(model, _comparable(model, counting)) for model in evaluated if model.step is not None]
    existing = [(model, names) for model, names in comparable if names and model.checkpoint.is_dir()]
    complete = [(model, names) for model, names in existing if names == counting.keys()]
    compared = complete or existing
    common = set.intersection(*(names for _, names in compared)) if compared else set()
    if not common:
        return None
    datasets = tuple(sorted(common))
    values: dict[int, float | None] = {model.saved_at: None for model, _ in comparable}
    values |= {model.saved_at: _mean(model, metric, datasets) for model, names in comparable if names >= common}
    measured = {step: value for step, value in values.items() if value is not None}
    if not measured:
        return None
    sign = 1 if mode == "max" else -1
    candidates = (model for model, _ in compared if model.step in measured)
    best = max(candidates, key=lambda model: (sign * measured[model.saved_at], model.saved_at))
    value, interval = measured[best.saved_at], _interval(best, metric, datasets)
    steps = {model.step for model, _ in compared}
    partial = tuple(model.label for model, _ in existing if model.step not in steps)
    return SelectionResult(best, metric, mode, datasets, settings, value, interval, values, partial)


def _comparable(model: EvaluatedModel, settings: ComparedSettings) -> set[str]:
    """Datasets on which a model was evaluated with these settings."""
    return {
        name
        for name, result in model.datasets.items()
        if name in settings and _compared(settings[name]).items() <= _compared(result.protocol).items()
    }


def with_same_settings(
    evaluated: Sequence[EvaluatedModel], best: EvaluatedModel, compared: ComparedSettings
) -> list[EvaluatedModel]:
    """Remove results that cannot be compared with the best checkpoint's, and models without any other results.

    On datasets without results of the best checkpoint, the newest results determine the settings.

    Args:
        evaluated: the run's checkpoints, ordered by step.
        compared: settings of the selection; only their names are used.
    """
    keys = {key for settings in compared.values() for key in settings}
    settings = {
        name: {key: value for key, value in result.protocol.items() if key in keys}
        for model in (*evaluated, best)
        for name, result in model.datasets.items()
    }
    comparable = ((model, _comparable(model, settings)) for model in evaluated)
    return [
        replace(model, datasets={name: result for name, result in model.datasets.items() if name in names})
        for model, names in comparable
        if names
    ]


def _compared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in the form in which they are compared.

    Importable packages are reduced to their names; results with different releases of a package stay comparable.
    """
    packages = settings.get("packages")
    named = {"packages": sorted(packages)} if isinstance(packages, Mapping) else {}
    return {"chat_template_kwargs": {}, **settings, **named}


def _weighted_results(model: EvaluatedModel, datasets: Collection[str]) -> list[tuple[float, DatasetResult]]:
    """Each dataset's result with its share of the problems."""
    results = [model.datasets[name] for name in datasets]
    sizes = [result.metrics["num_problems"] or 0 for result in results]
    return [(size / sum(sizes), result) for size, result in zip(sizes, results)]


def _mean(model: EvaluatedModel, metric: str, datasets: Collection[str]) -> float | None:
    parts: list[float] = []
    for weight, result in _weighted_results(model, datasets):
        value = result.metrics.get(metric)
        if value is None or not math.isfinite(value):
            return None
        parts.append(weight * value)
    return math.fsum(parts)


def _interval(model: EvaluatedModel, metric: str, datasets: Collection[str]) -> Interval | None:
    """Interval of the weighted mean: the distances from each dataset's rate to its bounds are added in quadrature.

    Source:
        Zou and Donner 2008, Statistics in Medicine 27(10), the method MOVER.
    """
    results = _weighted_results(model, datasets)
    if any(metric not in result.intervals for _, result in results):
        return None
    mean = math.fsum(weight * result.rate(metric) for weight, result in results)
    below, above = (_distance(results, metric, side) for side in (0, 1))
    return mean - below, mean + above


def _distance(results: Collection[tuple[float, DatasetResult]], metric: str, side: int) -> float:
    distances = ((weight, result.rate(metric) - result.intervals[metric][side]) for weight, result in results)
    return math.sqrt(math.fsum((weight * distance) ** 2 for weight, distance in distances))


# best_checkpoint.json


@dataclass(frozen=True)
class BestCheckpoint:
    """The part of `best_checkpoint.json` that is read back."""

    step: int
    metric: str
    mode: Literal["max", "min"]
    datasets: tuple[str, ...]
    """Datasets over which the metric was averaged."""
    settings: dict[str, dict[str, Any]]
    """Settings of each dataset that may count."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong type, which another version or a person may have written."""
        named = isinstance(self.metric, str) and self.mode in ("max", "min")
        settings = isinstance(self.settings, dict) and all(isinstance(each, dict) for each in self.settings.values())
        datasets = self.datasets and all(isinstance(name, str) for name in self.datasets)
        if not isinstance(self.step, int) or not named or not settings or not datasets:
            raise TypeError("a value has the wrong type")


def write_best_checkpoint(run_dir: Path, selected: SelectionResult, evaluated: Sequence[EvaluatedModel]) -> Path:
    """Replace `best_checkpoint.json` in the run directory.

    Args:
        run_dir: holds the `global_step_N` directories; rotation reads `step` from the file and keeps that checkpoint.
        selected: the best checkpoint.
        evaluated: all evaluated checkpoints, whose metrics go into the file.

    Raises:
        UserError: it cannot be written.
    """
    best = selected.best
    content = {
        "step": best.step,
        "checkpoint": best.checkpoint.name,
        "export": best.export,
        "metric": selected.metric,
        "mode": selected.mode,
        "value": selected.value,
        "interval": selected.interval,
        "datasets": selected.datasets,
        "incomplete": {name: num for name, num in best.incomplete.items() if name in selected.datasets},
        "settings": selected.settings,
        "selected_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoints": [_entry(model, selected) for model in evaluated if model.step is not None],
    }
    return write_json(run_dir / BEST, content)


def _entry(model: EvaluatedModel, selected: SelectionResult) -> dict[str, Any]:
    return {
        "step": model.step,
        "checkpoint": model.checkpoint.name,
        "exists": model.checkpoint.is_dir(),
        "value": selected.values[model.saved_at],
        "datasets": {name: metrics_with_intervals(result) for name, result in model.datasets.items()},
    }


def read_best_checkpoint(run_dir: Path) -> BestCheckpoint:
    """Read `best_checkpoint.json`.

    Raises:
        UserError: it is missing or malformed.
    """
    path = run_dir / BEST
    if not path.exists():
        raise UserError(f"{run_dir} has no {BEST}; evaluate the run with `watch`, which writes it")
    try:
        content = parse_json(path.read_bytes())
        return BestCheckpoint(
            step=content["step"],
            metric=content["metric"],
            mode=content["mode"],
            datasets=tuple(content["datasets"]),
            settings=content["settings"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {path} ({error!r}); delete it and evaluate the run with `watch`, which writes it"
        ) from error
