"""The text of a report, in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from eval_pipeline.figures.best_file import BestCheckpoint
from eval_pipeline.figures.comparison import COMPARED, Comparison
from eval_pipeline.figures.evaluated import DatasetResult, EvaluatedModel
from eval_pipeline.figures.plots.loss import LOSS_PLOT
from eval_pipeline.figures.table import format_value, markdown_table


def render_report(
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    num_checkpoints: int,
    comparisons: Mapping[str, Mapping[str, Comparison]],
    chosen_by: BestCheckpoint,
    plots: Sequence[str],
) -> str:
    """The report as Markdown.

    Args:
        baseline: the model that training started from.
        best: the chosen checkpoint.
        num_checkpoints: how many were evaluated.
        comparisons: best against base, by data set and metric.
        chosen_by: what the best was chosen by.
        plots: names of the PNG files beside the report.
    """
    blocks = [
        f"# {best.label} against the base model",
        _models(baseline, best, num_checkpoints, chosen_by),
        *_caveats(baseline, best, num_checkpoints, comparisons, chosen_by),
        *(
            _dataset(name, baseline.datasets[name], best.datasets[name], of_metrics)
            for name, of_metrics in comparisons.items()
        ),
        _READING,
        "## Settings",
        _settings(baseline, best, list(comparisons)),
        "## The run",
        *(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in plots),
    ]
    if LOSS_PLOT not in plots:
        blocks.append("There is no plot of the success rate over the loss, because the run recorded no loss.")
    return "\n\n".join(blocks) + "\n"


_COMPARED_COLUMNS = ("metric", "base model", "best checkpoint", "difference", "p")
_COUNTED_COLUMNS = ("number of problems", "both", "base only", "best only", "neither")
_READING = (
    "Brackets hold 95 % confidence intervals: Wilson's for rates (clustered by problem where a problem has several "
    "answers), Bonett and Price's for differences. They cover the variation over problems of the same kind. p is the "
    "probability of a difference at least this large if both models were equally good."
)


def _models(baseline: EvaluatedModel, best: EvaluatedModel, num_checkpoints: int, chosen_by: BestCheckpoint) -> str:
    extreme = "largest" if chosen_by.mode == "max" else "smallest"
    evaluated = "one evaluated checkpoint" if num_checkpoints == 1 else f"{num_checkpoints} evaluated checkpoints"
    return (
        f"- Base model: `{baseline.label}`, loaded from `{baseline.export}`\n"
        f"- Best checkpoint: `{best.label}`, loaded from `{best.export}`; {extreme} `{chosen_by.metric}` on "
        f"{_listed(chosen_by.datasets)} of {evaluated}"
    )


def _caveats(
    baseline: EvaluatedModel,
    best: EvaluatedModel,
    num_checkpoints: int,
    comparisons: Mapping[str, Any],
    chosen_by: BestCheckpoint,
) -> Iterator[str]:
    chosen_on = [name for name in comparisons if name in chosen_by.datasets]
    if num_checkpoints > 1 and chosen_on:
        yield (
            f"The checkpoint was selected by its results on {_listed(chosen_on)}. Its lead there is therefore biased "
            "upwards and p is too small; other data sets have no such bias."
        )
    differing = [name for name in comparisons if _conditions(baseline, name) != _conditions(best, name)]
    if differing:
        yield (
            f"**The two models were evaluated with different settings on {_listed(differing)}**, so the settings may "
            "explain a difference there; they are listed below."
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


def _dataset(name: str, base: DatasetResult, best: DatasetResult, comparisons: Mapping[str, Comparison]) -> str:
    example = next(iter(comparisons.values()))
    answers = "one answer" if example.num_samples == 1 else f"{example.num_samples} answers"
    blocks = [
        f"## {name}",
        f"{example.num_problems} problems with {answers} each; p from {example.test}.",
        markdown_table(_COMPARED_COLUMNS, _figure_rows(base, best, comparisons)),
    ]
    if example.num_samples == 1:
        blocks.append(markdown_table(_COUNTED_COLUMNS, _count_rows(comparisons)))
    return "\n\n".join(blocks)


def _figure_rows(
    base: DatasetResult, best: DatasetResult, comparisons: Mapping[str, Comparison]
) -> Iterator[tuple[str, ...]]:
    for metric in best.figures:
        cells = [format_value(result.figures.get(metric), result.intervals.get(metric)) for result in (base, best)]
        comparison = comparisons.get(metric)
        compared = ("", "") if comparison is None else (_difference(comparison), _p_value(comparison.p_value))
        yield (f"`{metric}`", *cells, *compared)


def _count_rows(comparisons: Mapping[str, Comparison]) -> Iterator[tuple[str, ...]]:
    for metric, comparison in comparisons.items():
        counts = (comparison.both, comparison.only_a, comparison.only_b, comparison.neither)
        yield (f"counted in `{metric}` ({_listed(COMPARED[metric])})", *map(str, counts))


def _difference(comparison: Comparison) -> str:
    low, high = comparison.interval
    return f"{comparison.difference:+.4f} [{low:+.4f}, {high:+.4f}]"


def _p_value(value: float) -> str:
    return "< 0.0001" if value < 0.0001 else f"{value:.4f}"


def _settings(baseline: EvaluatedModel, best: EvaluatedModel, datasets: Sequence[str]) -> str:
    columns = [{name: _conditions(model, name) for name in datasets} for model in (baseline, best)]
    keys = dict.fromkeys(key for column in columns for settings in column.values() for key in settings)
    rows = ((f"`{key}`", *(_setting(column, key) for column in columns)) for key in keys)
    return markdown_table(("setting", "base model", "best checkpoint"), rows)


def _conditions(model: EvaluatedModel, dataset: str) -> dict[str, str]:
    """Settings of one evaluation as texts, by dotted key."""
    result = model.datasets[dataset]
    return {"isolation": result.isolation, **dict(_flat(result.protocol))}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, str(value)


def _setting(of_datasets: Mapping[str, Mapping[str, str]], key: str) -> str:
    """A setting's value, with the data sets that have it where they differ."""
    values: dict[str, list[str]] = {}
    for name, settings in of_datasets.items():
        values.setdefault(settings.get(key, "-"), []).append(name)
    return next(iter(values)) if len(values) == 1 else "; ".join(f"{v} ({', '.join(on)})" for v, on in values.items())


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
