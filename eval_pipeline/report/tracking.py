"""Logs the results of an evaluation to the training run's W&B project."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_pipeline.report.results import EvaluatedModel
from verl_ext.metrics.wandb_sink import fill_wandb_run, open_wandb_run

if TYPE_CHECKING:
    from wandb import Run, Table

QaRow = Mapping[str, Any]


def log_to_wandb(
    model: EvaluatedModel,
    qa_rows: Mapping[str, Sequence[QaRow]],
    *,
    project: str,
    experiment: str | None,
    directory: Path,
    run_id: str | None = None,
) -> None:
    """Log one evaluation as the W&B run `phase1_eval_<label>`; if W&B cannot be used, warn and continue.

    Args:
        model: its results.
        qa_rows: by dataset, the rows of the question-and-answer log; shown as the table `eval/<dataset>/qa`.
        project: the training run's W&B project.
        experiment: the training run's name, which groups its evaluations.
        directory: where W&B stores its files.
        run_id: continues this W&B run if it exists, for example with results on further datasets; None starts a new
            one.
    """
    run = open_wandb_run(
        project=project,
        name=f"phase1_eval_{model.label}",
        directory=directory,
        config={key: value for key, value in model.to_json().items() if key != "datasets"},
        run_id=run_id,
        group=experiment,
        job_type="eval",
    )
    fill_wandb_run(run, lambda run: _log(run, model, qa_rows), results_in="metrics.json")


def wandb_metrics(model: EvaluatedModel) -> dict[str, float | int]:
    """Metrics as `eval/<dataset>/<metric>`, intervals as `eval/<dataset>/<metric>_low` and `_high`."""
    row: dict[str, float | int] = {}
    for dataset, result in model.datasets.items():
        for name, value in result.metrics.items():
            if value is not None:
                row[f"eval/{dataset}/{name}"] = value
        for name, bounds in result.intervals.items():
            row.update({f"eval/{dataset}/{name}_{side}": bound for side, bound in zip(("low", "high"), bounds)})
    return row


def _log(run: Run, model: EvaluatedModel, qa_rows: Mapping[str, Sequence[QaRow]]) -> None:
    tables = {f"eval/{dataset}/qa": _table(rows) for dataset, rows in qa_rows.items() if rows}
    # `global_step` is the axis of every chart, as in training; a model without a step has a row without it
    step = {} if model.step is None else {"global_step": model.step}
    run.log({**wandb_metrics(model), **tables, **step})
    run.summary["step"] = model.step


def _table(rows: Sequence[QaRow]) -> Table:
    import wandb

    columns = list(rows[0])
    return wandb.Table(columns=[*columns], data=[[_encodable(row[name]) for name in columns] for row in rows])


def _encodable(value: Any) -> Any:
    # W&B writes UTF-8, which cannot encode lone surrogates
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
