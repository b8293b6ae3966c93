"""`metrics.json` and `summary.json` of an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval_pipeline.figures.evaluated import DatasetResult, EvaluatedModel
from eval_pipeline.figures.writing import write_json
from verl_ext.errors import UserError
from verl_ext.files import parse_json

METRICS_FILE = "metrics.json"
SUMMARY_FILE = "summary.json"

HEADLINES = ("num_problems", "exec_success_rate", "accepted_at_1", "pass_ratio_mean", "truncation_rate")


def write_evaluation(directory: Path, model: EvaluatedModel) -> Path:
    """Write `summary.json` and then `metrics.json`, each whole or not at all.

    Args:
        directory: the evaluation's, such as `eval_step_200`; made when missing.
        model: what was found.

    Returns:
        The path of `metrics.json`, whose presence says that everything else is there.

    Raises:
        UserError: the directory cannot be made or written to.
        ValueError: a figure is not finite.
    """
    write_json(directory / SUMMARY_FILE, _summary(model))
    return write_json(directory / METRICS_FILE, model.to_json())


def read_evaluation(directory: Path) -> EvaluatedModel:
    """Read `metrics.json`.

    Raises:
        UserError: it is missing or malformed.
    """
    path = directory / METRICS_FILE
    try:
        return EvaluatedModel.of_json(parse_json(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read the results in {path} ({error!r}); evaluate the model again") from error


def _summary(model: EvaluatedModel) -> dict[str, Any]:
    return {
        "label": model.label,
        "step": model.step,
        "checkpoint": str(model.checkpoint),
        "tier": max((result.tier for result in model.datasets.values()), default=None),
        "datasets": {name: _headlines(result) for name, result in model.datasets.items()},
    }


def _headlines(result: DatasetResult) -> dict[str, Any]:
    names = [name for name in result.figures if name in HEADLINES or name.startswith("pass_at_")]
    intervals = {name: list(result.intervals[name]) for name in names if name in result.intervals}
    return {**{name: result.figures[name] for name in names}, "intervals": intervals}
