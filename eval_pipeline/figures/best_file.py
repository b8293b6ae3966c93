"""`best_checkpoint.json`, which tells the choice to rotation, to the report and to the next stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from eval_pipeline.figures.evaluated import EvaluatedModel, figures_with_intervals
from eval_pipeline.figures.selection import Choice
from eval_pipeline.figures.writing import write_json
from verl_ext.checkpoint.manifest import BEST
from verl_ext.errors import UserError
from verl_ext.files import parse_json


@dataclass(frozen=True)
class BestCheckpoint:
    """What a report needs of `best_checkpoint.json`.

    Attributes:
        step: of the chosen checkpoint.
        metric: what it was chosen by.
        mode: `max` or `min`.
        datasets: data sets that the metric was taken over.
        settings: of each data set that could count: what was the same for all that were compared.
    """

    step: int
    metric: str
    mode: Literal["max", "min"]
    datasets: tuple[str, ...]
    settings: dict[str, dict[str, Any]]


def write_best_checkpoint(run_dir: Path, choice: Choice, evaluated: Sequence[EvaluatedModel]) -> Path:
    """Replace `best_checkpoint.json` in the run directory.

    Args:
        run_dir: holds the `global_step_N` directories; rotation reads `step` from the file and keeps that one.
        choice: the best.
        evaluated: all evaluated checkpoints, whose figures go into the file.

    Raises:
        UserError: it cannot be written.
    """
    return write_json(run_dir / BEST, _content(choice, evaluated))


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
        best = BestCheckpoint(
            step=content["step"],
            metric=content["metric"],
            mode=content["mode"],
            datasets=tuple(content["datasets"]),
            settings=content["settings"],
        )
        _require_types(best)
        return best
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot read {path} ({error!r}); delete it and evaluate the run with `watch`, which writes it"
        ) from error


def _require_types(best: BestCheckpoint) -> None:
    """Refuse what another version, or a person, may have written; raises `TypeError`."""
    named = isinstance(best.metric, str) and best.mode in ("max", "min")
    settings = isinstance(best.settings, dict) and all(isinstance(each, dict) for each in best.settings.values())
    datasets = best.datasets and all(isinstance(name, str) for name in best.datasets)
    if not isinstance(best.step, int) or not named or not settings or not datasets:
        raise TypeError("a value of another kind")


def _content(choice: Choice, evaluated: Sequence[EvaluatedModel]) -> dict[str, Any]:
    return {
        "step": choice.best.step,
        "checkpoint": choice.best.checkpoint.name,
        "export": choice.best.export,
        "metric": choice.metric,
        "mode": choice.mode,
        "value": choice.value,
        "interval": choice.interval,
        "datasets": choice.datasets,
        "incomplete": {name: num for name, num in choice.best.incomplete.items() if name in choice.datasets},
        "settings": choice.settings,
        "selected_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "checkpoints": [_entry(model, choice) for model in evaluated if model.step is not None],
    }


def _entry(model: EvaluatedModel, choice: Choice) -> dict[str, Any]:
    return {
        "step": model.step,
        "checkpoint": model.checkpoint.name,
        "exists": model.checkpoint.is_dir(),
        "value": choice.values[model.saved_at],
        "datasets": {name: figures_with_intervals(result) for name, result in model.datasets.items()},
    }
