"""The report that compares a baseline with the best checkpoint: Markdown, JSON and plots."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from eval_pipeline.checkpoints import EvalDir
from eval_pipeline.report.comparison import COMPARED, RateComparison, compare_models
from eval_pipeline.report.metrics import CODE_METRIC, Interval
from eval_pipeline.report.plots import LOSS_PLOT, loss_history, plot_errors, plot_loss, plot_rates, short_name
from eval_pipeline.report.results import (
    DatasetResult,
    EvaluatedModel,
    Outcomes,
    published_models,
    read_evaluation,
    read_outcomes,
    write_json,
    write_text,
)
from eval_pipeline.report.selection import BestCheckpoint, read_best_checkpoint, with_same_settings
from verl_ext.console import markdown_table, text_table
from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import METRICS_FILE, iter_metrics

TABLE_FILE = "comparison_table.md"
DATA_FILE = "comparison_data.json"

_COUNTED_COLUMNS = ("number of problems", "both", "baseline only", "best only", "neither")
_EXPLANATION = (
    "Brackets hold 95% confidence intervals: Wilson's for rates (clustered by problem where a problem has several "
    "answers), Bonett and Price's for differences. They cover the variation over problems of the same kind. p is the "
    "probability of a difference at least this large if both models were equally good."
)


def write_report(
    directory: EvalDir, baseline_label: str, baseline_step: int | None = None, not_run: Collection[str] = ()
) -> Path:
    """Compare the best checkpoint of a run with a baseline, from the files of their evaluations.

    Writes `comparison_table.md`, `comparison_data.json` and the plots to `report/`.

    Args:
        directory: the run's evaluation directory.
        baseline_label: label of the initial model or of another checkpoint, whose results are in the same directory.
        baseline_step: step of a baseline that is a checkpoint of the run, whatever the label of its results.
        not_run: datasets whose answers are not run, so that their `exec_success_rate` is omitted.

    Returns:
        The path of `comparison_table.md`.

    Raises:
        UserError: a file cannot be read, the two models have no common dataset or were evaluated on different problems,
            or the report cannot be written.
    """
    chosen_by = read_best_checkpoint(directory.of_run)
    folders = [directory.results_of(label) for label in (baseline_label, f"step_{chosen_by.step}")]
    baseline, best = map(read_evaluation, folders)
    if baseline_step is not None:
        baseline = replace(baseline, label=f"step_{baseline_step}", step=baseline_step)
    comparisons = _compare((baseline, best), [read_outcomes(folder) for folder in folders], not_run)
    published = [model for model in published_models(directory.root) if model.step is not None]
    history = with_same_settings(published, best, chosen_by.settings)
    num_comparable = sum(model.datasets.keys() >= {*chosen_by.datasets} for model in history)
    log = directory.of_run / METRICS_FILE
    losses = loss_history(iter_metrics(log) if log.is_file() else (), {model.saved_at for model in history})
    datasets = list(dict.fromkeys(name for model in history for name in model.datasets))
    target = directory.root / "report"
    try:
        target.mkdir(parents=True, exist_ok=True)
        plots = [
            plot_rates(target, datasets, baseline, best, history, not_run),
            plot_errors(target, datasets, baseline, best, history),
        ]
        if losses is not None:
            plots.append(plot_loss(target, datasets, losses, history, not_run))
    except OSError as error:
        raise UserError(f"cannot write the plots to {target} ({error}); specify another directory") from error
    data = {
        "baseline": baseline.to_json(),
        "best": best.to_json(),
        "chosen_by": asdict(chosen_by),
        "comparisons": {
            dataset: {metric: asdict(comparison) for metric, comparison in of_metrics.items()}
            for dataset, of_metrics in comparisons.items()
        },
        "loss": losses
        and {"name": losses.name, "by_step": {model.step: losses.values.get(model.saved_at) for model in history}},
        "history": [model.to_json() for model in history],
    }
    write_json(target / DATA_FILE, data)
    omitted = _omitted(published, history)
    text = _render(baseline, best, num_comparable, comparisons, chosen_by, [path.name for path in plots], omitted)
    return write_text(target / TABLE_FILE, text)


def _compare(
    models: Sequence[EvaluatedModel], outcomes: Sequence[Mapping[str, Outcomes]], not_run: Collection[str]
) -> dict[str, dict[str, RateComparison]]:
    """Compare baseline and best checkpoint on each common dataset; returns the comparisons by dataset and metric."""
    baseline, best = models
    comparisons = {}
    for name in [name for name in best.datasets if name in baseline.datasets]:
        for model, of_datasets in zip(models, outcomes):
            if name not in of_datasets:
                raise UserError(f"the verdicts of {model.label} on {name} are missing; evaluate it again")
        try:
            compared = compare_models(*(of_datasets[name] for of_datasets in outcomes))
        except UserError as error:
            raise UserError(f"{baseline.label} and {best.label} cannot be compared on {name}: {error}") from error
        comparisons[name] = {
            metric: comparison
            for metric, comparison in compared.items()
            if metric != CODE_METRIC or name not in not_run
        }
    if not comparisons:
        raise UserError(
            f"{baseline.label} was evaluated on {', '.join(baseline.datasets) or 'nothing'} and {best.label} on "
            f"{', '.join(best.datasets) or 'nothing'}; evaluate both on a common dataset"
        )
    return comparisons


def _omitted(published: Sequence[EvaluatedModel], history: Sequence[EvaluatedModel]) -> dict[str, list[str]]:
    """Labels of the checkpoints whose results on a dataset have other settings than those in the plots, by dataset."""
    shown = {(model.label, name) for model in history for name in model.datasets}
    omitted: dict[str, list[str]] = {}
    for model in published:
        for name in model.datasets:
            if (model.label, name) not in shown:
                omitted.setdefault(name, []).append(model.label)
    return omitted


# Markdown


def _render(
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    num_comparable: int,
    comparisons: Mapping[str, Mapping[str, RateComparison]],
    chosen_by: BestCheckpoint,
    plots: Sequence[str],
    omitted: Mapping[str, Sequence[str]],
) -> str:
    """The report as Markdown; `plots` are names of the PNG files next to it. For `omitted`, see `_omitted`."""
    blocks = [
        f"# {best.label} against {baseline.label if baseline.step is not None else 'the base model'}",
        _models(baseline, best, num_comparable, chosen_by),
        *_caveats(baseline, best, num_comparable, comparisons, chosen_by),
        *(_dataset(name, baseline, best.datasets[name], of_metrics) for name, of_metrics in comparisons.items()),
        _EXPLANATION,
        "## Settings",
        _settings(baseline, best, list(comparisons)),
        "## The run",
        *(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots),
    ]
    if omitted:
        on = "; ".join(f"{_listed(labels)} on `{name}`" for name, labels in omitted.items())
        blocks.append(f"The plots omit results with other settings: {on}.")
    if LOSS_PLOT not in plots:
        blocks.append("There is no plot of the success rate against the loss, because the run recorded no loss.")
    return "\n\n".join(blocks) + "\n"


def _models(baseline: EvaluatedModel, best: EvaluatedModel, num_comparable: int, chosen_by: BestCheckpoint) -> str:
    extreme = "largest" if chosen_by.mode == "max" else "smallest"
    compared = "one comparable checkpoint" if num_comparable == 1 else f"{num_comparable} comparable checkpoints"
    role = "Base model" if baseline.step is None else "Baseline"
    return (
        f"- {role}: `{baseline.label}`, loaded from `{baseline.export}`\n"
        f"- Best checkpoint: `{best.label}`, loaded from `{best.export}`; {extreme} `{chosen_by.metric}` on "
        f"{_listed(chosen_by.datasets)} of {compared}"
    )


def _caveats(
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    num_comparable: int,
    comparisons: Mapping[str, Any],
    chosen_by: BestCheckpoint,
) -> Iterator[str]:
    chosen_on = [name for name in comparisons if name in chosen_by.datasets]
    if num_comparable > 1 and chosen_on:
        yield (
            f"The checkpoint was selected by its results on {_listed(chosen_on)}. There, its lead is therefore biased "
            "upwards, and p is too small. Other datasets have no such bias."
        )
    differing = [name for name in comparisons if _conditions(baseline, name) != _conditions(best, name)]
    if differing:
        yield (
            f"**The two models were evaluated with different settings on {_listed(differing)}**, which may explain a "
            "difference there. The settings are listed below."
        )
    for model in (baseline, best):
        for name, num in model.incomplete.items():
            yield (
                f"**The results of `{model.label}` on `{name}` are incomplete**: {num} answers have no verdict "
                "(`api_error`) and count as wrong."
            )
    alone = [name for name in {**baseline.datasets, **best.datasets} if name not in comparisons]
    if alone:
        yield f"Not compared, because only one of the two models was evaluated on it: {_listed(alone)}."


def _dataset(
    name: str, baseline: EvaluatedModel, best: DatasetResult, comparisons: Mapping[str, RateComparison]
) -> str:
    example = next(iter(comparisons.values()))
    problems = "One problem" if example.num_problems == 1 else f"{example.num_problems} problems"
    answers = "one answer" if example.num_samples == 1 else f"{example.num_samples} answers"
    blocks = [
        f"## {name}",
        f"{problems} with {answers}{' each' if example.num_problems > 1 else ''}; p from {example.test}.",
        markdown_table(
            ("metric", short_name(baseline), "best checkpoint", "difference", "p"),
            _metric_rows(baseline.datasets[name], best, comparisons),
        ),
    ]
    if example.num_samples == 1:
        blocks.append(markdown_table(_COUNTED_COLUMNS, _count_rows(comparisons)))
    return "\n\n".join(blocks)


def _metric_rows(
    base: DatasetResult, best: DatasetResult, comparisons: Mapping[str, RateComparison]
) -> Iterator[tuple[str, ...]]:
    for metric in best.metrics:
        if metric in COMPARED and metric not in comparisons:
            continue  # the answers are not run
        cells = [format_value(result.metrics.get(metric), result.intervals.get(metric)) for result in (base, best)]
        difference = p_value = ""
        if metric in comparisons:
            found, (low, high) = comparisons[metric], comparisons[metric].interval
            difference = f"{found.difference:+.4f} [{low:+.4f}, {high:+.4f}]"
            p_value = "< 0.0001" if found.p_value < 0.0001 else f"{found.p_value:.4f}"
        yield (f"`{metric}`", *cells, difference, p_value)


def _count_rows(comparisons: Mapping[str, RateComparison]) -> Iterator[tuple[str, ...]]:
    for metric, comparison in comparisons.items():
        counts = (comparison.both, comparison.only_a, comparison.only_b, comparison.neither)
        yield (f"counted in `{metric}` ({_listed(COMPARED[metric])})", *map(str, counts))


def _settings(baseline: EvaluatedModel, best: EvaluatedModel, datasets: Sequence[str]) -> str:
    columns = [{name: _conditions(model, name) for name in datasets} for model in (baseline, best)]
    keys = dict.fromkeys(key for column in columns for settings in column.values() for key in settings)
    rows = ((f"`{key}`", *(_setting(column, key) for column in columns)) for key in keys)
    return markdown_table(("setting", short_name(baseline), "best checkpoint"), rows)


def _conditions(model: EvaluatedModel, dataset: str) -> dict[str, str]:
    """The settings of one evaluation as text, by dotted key."""
    result = model.datasets[dataset]
    return {"isolation": result.isolation, **dict(_flat(result.protocol))}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)


def _setting(of_datasets: Mapping[str, Mapping[str, str]], key: str) -> str:
    """The value of a setting; if datasets differ, each value with its datasets."""
    values: dict[str, list[str]] = {}
    for name, settings in of_datasets.items():
        values.setdefault(settings.get(key, "-"), []).append(name)
    return next(iter(values)) if len(values) == 1 else "; ".join(f"{v} ({', '.join(on)})" for v, on in values.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Tables


def format_table(datasets: Mapping[str, DatasetResult]) -> str:
    """A table for the terminal with one row per metric and one column per dataset; an undefined metric is a dash.

    Args:
        datasets: result by dataset, at least one.
    """
    names = list(dict.fromkeys(name for result in datasets.values() for name in result.metrics))
    columns = [["", *names]]
    for dataset, result in datasets.items():
        cells = (format_value(result.metrics.get(name), result.intervals.get(name)) for name in names)
        columns.append([dataset, *cells])
    return text_table(list(zip(*columns, strict=True)))


def format_value(value: float | int | None, interval: Interval | None) -> str:
    """A metric with four decimals, or an integer unchanged; its interval follows in brackets."""
    if value is None:
        return "-"
    text = str(value) if isinstance(value, int) else f"{value:.4f}"
    return text if interval is None else f"{text} [{interval[0]:.4f}, {interval[1]:.4f}]"
