"""The report: the base model against the best checkpoint, and how the run came there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eval_pipeline.figures.best_file import BestCheckpoint
from eval_pipeline.figures.comparison import Comparison, Outcomes, compare
from eval_pipeline.figures.evaluated import EvaluatedModel
from eval_pipeline.figures.plots.errors import plot_errors
from eval_pipeline.figures.plots.loss import LossHistory, loss_history, plot_loss
from eval_pipeline.figures.plots.rates import plot_rates
from eval_pipeline.figures.report_text import render_report
from eval_pipeline.figures.writing import write_json, write_text
from verl_ext.errors import UserError

TABLE_FILE = "comparison_table.md"
DATA_FILE = "comparison_data.json"


def write_report(
    directory: Path,
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
    training_history: Iterable[Mapping[str, Any]],
    outcomes: tuple[Mapping[str, Outcomes], Mapping[str, Outcomes]],
    chosen_by: BestCheckpoint,
) -> Path:
    """Write `comparison_table.md`, `comparison_data.json` and the plots.

    Args:
        directory: for the report; made when missing.
        baseline: the model that training started from.
        best: the chosen checkpoint, which has a step.
        history: all evaluated checkpoints of the run, the best among them.
        training_history: rows of the run's `metrics.jsonl`, oldest first; none where there is no such file.
        outcomes: of the base model and of the best, by data set; `read_outcomes` reads them.
        chosen_by: what the best was chosen by.

    Returns:
        The path of `comparison_table.md`.

    Raises:
        UserError: the two have no data set in common, were asked different problems, or the report cannot be written.
    """
    history = sorted((model for model in history if model.step is not None), key=lambda model: model.saved_at)
    comparisons = _compare(baseline, best, outcomes)
    losses = loss_history(training_history, {model.saved_at for model in history})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        plots = _plot(directory, baseline, best, history, losses)
    except OSError as error:
        raise UserError(f"cannot write the plots to {directory} ({error}); name another directory") from error
    write_json(directory / DATA_FILE, _data(baseline, best, history, comparisons, losses, chosen_by))
    text = render_report(baseline, best, len(history), comparisons, chosen_by, [path.name for path in plots])
    return write_text(directory / TABLE_FILE, text)


def _compare(
    baseline: EvaluatedModel, best: EvaluatedModel, outcomes: tuple[Mapping[str, Outcomes], Mapping[str, Outcomes]]
) -> dict[str, dict[str, Comparison]]:
    common = [name for name in best.datasets if name in baseline.datasets]
    if not common:
        raise UserError(
            f"{baseline.label} was evaluated on {', '.join(baseline.datasets) or 'nothing'} and {best.label} on "
            f"{', '.join(best.datasets) or 'nothing'}; evaluate both on a common data set"
        )
    return {name: _compare_on(name, baseline, best, outcomes) for name in common}


def _compare_on(
    name: str,
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    outcomes: tuple[Mapping[str, Outcomes], Mapping[str, Outcomes]],
) -> dict[str, Comparison]:
    for model, of_datasets in zip((baseline, best), outcomes):
        if name not in of_datasets:
            raise UserError(f"the verdicts of {model.label} on {name} are missing; evaluate it again")
    try:
        return compare(outcomes[0][name], outcomes[1][name])
    except UserError as error:
        raise UserError(f"{baseline.label} and {best.label} cannot be compared on {name}: {error}") from error


def _plot(
    directory: Path,
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
    losses: LossHistory | None,
) -> list[Path]:
    datasets = list(dict.fromkeys(name for model in history for name in model.datasets))
    plots = [draw(directory, datasets, baseline, best, history) for draw in (plot_rates, plot_errors)]
    against_loss = plot_loss(directory, datasets, losses, history) if losses else None
    return plots + ([against_loss] if against_loss else [])


def _data(
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    history: Sequence[EvaluatedModel],
    comparisons: Mapping[str, Mapping[str, Comparison]],
    losses: LossHistory | None,
    chosen_by: BestCheckpoint,
) -> dict[str, Any]:
    return {
        "baseline": baseline.to_json(),
        "best": best.to_json(),
        "chosen_by": asdict(chosen_by),
        "comparisons": {
            dataset: {metric: asdict(comparison) for metric, comparison in of_metrics.items()}
            for dataset, of_metrics in comparisons.items()
        },
        "loss": losses
        and {"name": losses.name, "by_step": {model.step: losses.at(model.saved_at) for model in history}},
        "history": [model.to_json() for model in history],
    }
