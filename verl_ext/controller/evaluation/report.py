"""Reports a comparison as JSON, matrices, a Markdown page, console tables and plots, and to W&B."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.checkpoints import read_training_run
from eval_pipeline.report.plot_style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    VERMILLION,
    label_points,
    legend_below,
    panels,
    percent_axis,
    write_figure,
)
from eval_pipeline.report.results import write_json, write_text
from verl_ext.console import markdown_table, text_table
from verl_ext.controller.evaluation.results import (
    ALLOWED_VIOLATIONS,
    ControllerComparison,
    MethodAtBudget,
    ResultMatrices,
)
from verl_ext.controller.source import ControllerSource
from verl_ext.errors import UserError
from verl_ext.files import replacing
from verl_ext.metrics.csv_tables import TRAINING_FILE, VALIDATION_FILE
from verl_ext.metrics.wandb_sink import fill_wandb_run, open_wandb_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from wandb import Run

DATA_FILE, TABLE_FILE, MATRICES_FILE = "adaptive.json", "adaptive.md", "adaptive.npz"
PARETO_PLOT, CURVES_PLOT = "pareto.png", "curves.png"
PREFIX = "eval/adaptive/"
AXIS = f"{PREFIX}budget_ms"
ROW_HEADER = ("method", "budget ms", "accuracy", "latency ms", "p50", "p95", "violations", "complexity")
CONFIGURATION_HEADER = ("tier", "blocks", "top-k")
Table = list[list[str]]


# Files


def write_report(
    directory: Path, comparison: ControllerComparison, info: Mapping[str, Any], source: ControllerSource
) -> None:
    """Write `adaptive.json`, `adaptive.md`, `adaptive.npz`, `pareto.png`, and for a run `curves.png`.

    Args:
        info: description of how the results were obtained, as plain values.

    Raises:
        UserError: a file cannot be written.
    """
    with _writing_to(directory):
        write_matrices(directory / MATRICES_FILE, comparison)
        plots = {"accuracy against latency": plot_pareto(directory, comparison)}
        if (curves := plot_curves(directory, source)) is not None:
            plots["the training's curves"] = curves
    write_json(directory / DATA_FILE, {**info, **comparison_content(comparison)})
    write_text(directory / TABLE_FILE, markdown_report(comparison, info, plots))


@contextmanager
def _writing_to(directory: Path) -> Iterator[None]:
    """Create a directory, and turn write errors within the context into a `UserError`.

    Raises:
        UserError: the directory or a file in it cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(f"cannot write to {directory} ({error}); specify another --output") from error


def require_writable(directory: Path) -> None:
    """Create a directory and check that it is writable, before hours of measurements.

    Raises:
        UserError: the directory is not writable.
    """
    with _writing_to(directory), TemporaryFile(dir=directory):
        pass


def comparison_content(comparison: ControllerComparison) -> dict[str, Any]:
    """The results as plain values."""
    statics = [static_content(comparison, index) for index in range(len(comparison.statics))]
    return {
        "budgets_ms": list(comparison.budgets_ms),
        "summary": asdict(comparison.summary),
        "rows": [asdict(row) for row in comparison.rows],
        "statics": statics,
        "pareto_front": comparison.front,
        "lookup_table": [
            {"budget_ms": budget, "static": index, "configuration": statics[index]["configuration"]}
            for budget, index in zip(comparison.budgets_ms, comparison.table)
        ],
    }


def static_content(comparison: ControllerComparison, index: int) -> dict[str, Any]:
    """The results of a static configuration on training and on held-out questions."""
    configuration, space = comparison.statics[index], comparison.space
    content: dict[str, Any] = {"configuration": space.describe(configuration)}
    for split, results in {"train": comparison.measured.train, "held_out": comparison.measured.statics}.items():
        latency = results.latency_ms[:, index]
        p50, p95 = np.percentile(latency, [50, 95]).tolist()
        content[split] = {
            "accuracy": float(results.accuracy[:, index].mean()),
            "latency_ms_mean": float(latency.mean()),
            "latency_ms_p50": p50,
            "latency_ms_p95": p95,
            "violation_rates": [float((latency > budget).mean()) for budget in comparison.budgets_ms],
        }
    return {**content, "complexity": space.complexity(configuration)}


def write_matrices(path: Path, comparison: ControllerComparison) -> None:
    """Write all matrices (samples, columns) as `<method>_accuracy`, `<method>_latency_ms` and so on.

    The other arrays are `deciding_ms`, the ids of the questions, and the controller's choices: `controller_tier`
    (samples, budgets), and `controller_blocks` and `controller_topk` (samples, budgets, blocks).
    """
    measured = comparison.measured
    matrices = {"train": measured.train, "statics": measured.statics, **comparison.methods}
    arrays = {f"{name}_{part}": array for name, results in matrices.items() for part, array in vars(results).items()}
    choices = [[vars(each) for each in row] for row in measured.configurations]
    for part in ("tier", "blocks", "topk"):
        arrays[f"controller_{part}"] = np.array([[each[part] for each in row] for row in choices])
    arrays["sample_ids"], arrays["train_sample_ids"] = map(np.array, (measured.sample_ids, measured.train_sample_ids))
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, **arrays, deciding_ms=measured.deciding)


# Text


def console_report(comparison: ControllerComparison) -> str:
    """Text with the accuracies by budget, the methods over all budgets, and the summary."""
    parts = [
        "accuracy in %, and in parentheses the share of answers that exceed the budget, if any",
        text_table(budget_table(comparison)),
        "over all budgets",
        text_table(method_table(comparison)),
        *summary_lines(comparison),
    ]
    return "\n".join(parts)


def markdown_report(comparison: ControllerComparison, info: Mapping[str, Any], plots: Mapping[str, Path]) -> str:
    """Text of the Markdown page.

    Args:
        info: description of how the results were obtained.
        plots: PNG files next to the page, by title.
    """
    header, *methods = method_table(comparison)
    lookups = zip(comparison.budgets_ms, comparison.table)
    entries = ([f"{budget:.1f}", *configuration_cells(comparison, index)] for budget, index in lookups)
    settings = ([f"`{name}`", str(value)] for name, value in {**info["protocol"], **info["machine"]}.items())
    parts = [
        "# The controller and its baselines",
        f"`{info['checkpoint']}` for `{info['vlm']['path']}`",
        *summary_lines(comparison),
        *(f"![{title}]({path.name})" for title, path in plots.items()),
        "## Over all budgets",
        markdown_table(header, methods),
        "## By budget",
        markdown_table(ROW_HEADER, (row_cells(row) for row in comparison.rows)),
        "## Lookup table",
        markdown_table(("budget ms", *CONFIGURATION_HEADER), entries),
        "## Pareto front of the static configurations",
        markdown_table((*CONFIGURATION_HEADER, "accuracy", "latency ms"), front_rows(comparison)),
        "## Protocol",
        markdown_table(("setting", "value"), settings),
    ]
    return "\n\n".join(parts) + "\n"


def budget_table(comparison: ControllerComparison) -> Table:
    """A row per budget, a column per method."""
    cells = {
        name: [
            f"{100 * accuracy:.1f}" + (f" ({100 * late:.0f}% late)" if late else "")
            for accuracy, late in zip(results.accuracy.mean(0), comparison.violation_rates(name))
        ]
        for name, results in comparison.methods.items()
    }
    budgets = [f"{budget:.1f}" for budget in comparison.budgets_ms]
    return [["budget ms", *cells], *(list(row) for row in zip(budgets, *cells.values()))]


def method_table(comparison: ControllerComparison) -> Table:
    """A row per method with means over samples and budgets, and the worst violation rate."""
    table = [["method", "accuracy", "latency ms", "violations", "worst", "complexity"]]
    for name, results in comparison.methods.items():
        rates = comparison.violation_rates(name)
        accuracy, latency, complexity = (part.mean() for part in results.parts)
        late = [f"{100 * rate:.1f}%" for rate in (rates.mean(), rates.max())]
        table.append([name, f"{100 * accuracy:.1f}%", f"{latency:.1f}", *late, f"{complexity:.3f}"])
    return table


def summary_lines(comparison: ControllerComparison) -> list[str]:
    """The summary as lines of text."""
    summary = comparison.summary
    gain = f"controller - lookup table: {100 * summary.controller_minus_lookup_table:+.2f} points"
    if summary.interval is not None:
        low, high = (f"{100 * bound:+.2f}" for bound in summary.interval)
        gain += f", 95% interval [{low}, {high}]"
    gap = "at no budget is the oracle at least one point better than the lookup table, so there is no gap to close"
    if summary.gap_closed is not None:
        gap = (
            f"share closed of the gap between lookup table and oracle: {100 * summary.gap_closed:.1f}% "
            f"({summary.num_gap_budgets} of {len(comparison.budgets_ms)} budgets have a gap)"
        )
    late = f"{100 * summary.worst_violation_rate:.1f}% at {summary.worst_violation_budget_ms:.1f} ms"
    parts = f"features {summary.features_ms:.2f}, network {summary.network_ms:.2f}, choice {summary.choice_ms:.2f}"
    share = f"the network takes {100 * summary.network_share:.2f}% of the full model's {summary.full_ms:.1f} ms"
    decision = f"decision: {summary.decision_ms:.2f} ms ({parts}); {share}"
    if not comparison.measured.is_measured:
        decision = f"decision: {summary.decision_ms:.2f} ms by the latency model; measured: {parts} ms; {share}"
    lines = [gain, gap, f"worst violation rate: {late}", decision]
    again = f"repeated because of other CPU load: {100 * summary.retries_per_run:.1f}% of the runs"
    return [*lines, again] if summary.retries_per_run else lines


def configuration_cells(comparison: ControllerComparison, index: int) -> list[str]:
    """The `CONFIGURATION_HEADER` cells of a static configuration; top-k refers to the blocks after the first."""
    configuration, space = comparison.statics[index], comparison.space
    topk = max(configuration.topk[1:], default=0) or space.full_topk
    return [
        space.tiers[configuration.tier],
        f"{configuration.num_active} of {len(configuration.blocks)}",
        str(topk) if configuration.topk else "-",
    ]


def front_rows(comparison: ControllerComparison) -> Table:
    """A row per configuration of the Pareto front."""
    accuracy, latency, _ = (part.mean(0) for part in comparison.measured.statics.parts)
    return [
        [*configuration_cells(comparison, index), f"{100 * accuracy[index]:.1f}%", f"{latency[index]:.1f}"]
        for index in comparison.front
    ]


def row_cells(row: MethodAtBudget) -> list[str]:
    """The cells of a row as text."""
    times = (row.latency_ms_mean, row.latency_ms_p50, row.latency_ms_p95)
    return [
        row.method,
        f"{row.budget_ms:.1f}",
        f"{100 * row.accuracy:.1f}%",
        *(f"{time:.1f}" for time in times),
        f"{100 * row.violation_rate:.1f}%",
        f"{row.complexity:.3f}",
    ]


# Plots

METHOD_LINES = {
    "oracle": (GREEN, "^", "oracle"),
    "lookup_table": (ORANGE, "s", "lookup table"),
    "controller": (BLUE, "o", "controller"),
}
EPOCH_TABLES = {
    TRAINING_FILE: (ORANGE, "training: sampled configurations"),
    VALIDATION_FILE: (BLUE, "validation: most likely configuration"),
}
EPOCH_PANELS = {
    "reward_mean": "reward",
    "accuracy_mean": "accuracy",
    "latency_mean": "latency (ms)",
    "budget_violation_rate": "over budget",
}
EPOCH_SHARES = ("accuracy_mean", "budget_violation_rate")


def plot_pareto(directory: Path, comparison: ControllerComparison) -> Path:
    """Plot mean accuracy against mean latency; the controller's points are labeled with their budgets."""
    samples = len(comparison.measured.statics.accuracy)
    late = f"hollow: over {100 * ALLOWED_VIOLATIONS:.0f}% of the answers are late"
    title = f"{samples} questions; a line connects budgets; {late}"
    figure, [axes] = panels([title], "Accuracy against latency")
    latency, accuracy = _means(comparison.measured.statics)
    axes.scatter(latency, accuracy, color="#BBBBBB", s=22, label="static configurations", zorder=2)
    # steps, because between two configurations of the front, the faster one is the best available
    style: dict[str, Any] = {"color": "#888888", "linewidth": 1.0, "label": "their Pareto front", "zorder": 2}
    axes.step(latency[comparison.front], accuracy[comparison.front], where="post", **style)
    latency, accuracy = _means(comparison.methods["random"])
    axes.scatter(latency, accuracy, color=PURPLE, marker="v", s=30, label="random", zorder=3)
    latency, accuracy = _means(comparison.methods["full"])
    axes.scatter(latency[:1], accuracy[:1], color=VERMILLION, marker="*", s=190, label="full model", zorder=3)
    for name, (color, marker, label) in METHOD_LINES.items():
        latency, accuracy = _means(comparison.methods[name])
        axes.plot(latency, accuracy, color=color, marker=marker, markersize=7, linewidth=1.5, label=label, zorder=4)
        is_late = comparison.violation_rates(name) > ALLOWED_VIOLATIONS
        points = latency[is_late], accuracy[is_late]
        axes.plot(*points, marker, color=color, markersize=7, markerfacecolor="white", zorder=5)
    _scale(axes)
    _label_budgets(axes, comparison)
    legend_below(figure, [axes], max_columns=3)
    return write_figure(figure, directory / PARETO_PLOT)


def _scale(axes: Axes) -> None:
    from matplotlib.ticker import PercentFormatter

    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel("mean accuracy")
    axes.set_xlabel("mean latency (ms)")
    axes.margins(x=0.06, y=0.1)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02), min(high, 1.02))


def _label_budgets(axes: Axes, comparison: ControllerComparison) -> None:
    from matplotlib.patheffects import withStroke

    latency, accuracy = _means(comparison.methods["controller"])
    label_points(axes, latency, accuracy, [f"{budget:.0f} ms" for budget in comparison.budgets_ms])
    for text in axes.texts:  # lines and points continue below the labels
        text.set(color=BLUE, zorder=6, path_effects=[withStroke(linewidth=3, foreground="white")])


def _means(results: ResultMatrices) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return results.latency_ms.mean(0), results.accuracy.mean(0)


def plot_curves(directory: Path, source: ControllerSource) -> Path | None:
    """Plot reward, accuracy, latency and violations by epoch, from the run's tables of training and validation.

    Returns:
        Path of the PNG; None for an export outside a run, or a run without these tables.

    Raises:
        OSError: the PNG cannot be written.
    """
    tables = {} if source.run_dir is None else {name: _read_table(source.run_dir / name) for name in EPOCH_TABLES}
    if not any(tables.values()):
        return None
    from matplotlib.ticker import MaxNLocator

    figure, all_axes = panels(list(EPOCH_PANELS.values()), "Training of the controller, by epoch")
    for axes, column in zip(all_axes, EPOCH_PANELS):
        for name, table in tables.items():
            color, legend = EPOCH_TABLES[name]
            epochs, values = ([float(row[key]) for row in table] for key in ("epoch", column))
            axes.plot(epochs, values, color=color, marker="o", markersize=4, label=legend)
        if column in EPOCH_SHARES:
            percent_axis(axes, "")
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.set_xlabel("epoch")
    legend_below(figure, all_axes, max_columns=2)
    return write_figure(figure, directory / CURVES_PLOT)


def _read_table(path: Path) -> list[Mapping[str, str]]:
    """The rows of a CSV table; empty if the file does not exist."""
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


# W&B


def log_to_wandb(
    comparison: ControllerComparison, info: Mapping[str, Any], source: ControllerSource, directory: Path
) -> None:
    """Log a comparison as a separate W&B run in the training run's project; only warn if W&B cannot be used.

    Args:
        info: configuration of the W&B run.
        directory: directory of the report files.
    """
    training = read_training_run(source.run_dir)
    name = "adaptive_eval" if source.step is None else f"adaptive_eval_step_{source.step}"
    run = open_wandb_run(
        project=training.project,
        name=name,
        directory=source.run_dir or directory,
        config=info,
        group=training.experiment,
        job_type="eval",
        proxy=training.wandb_proxy,
    )
    fill_wandb_run(run, lambda run: _log(run, comparison, source.step, directory), results_in=directory)


def budget_metrics(comparison: ControllerComparison) -> list[dict[str, float]]:
    """The metrics of all methods for each budget, with the budget as their axis."""
    metrics: dict[float, dict[str, float]] = {budget: {AXIS: budget} for budget in comparison.budgets_ms}
    for row in comparison.rows:
        values = asdict(row)
        method, budget = values.pop("method"), values.pop("budget_ms")
        metrics[budget].update({f"{PREFIX}{method}_{name}": value for name, value in values.items()})
    return list(metrics.values())


def summary_metrics(comparison: ControllerComparison) -> dict[str, float]:
    """The summary without missing values."""
    values = asdict(comparison.summary)
    interval = values.pop("interval") or ()
    bounds = {f"controller_minus_lookup_table_{side}": bound for side, bound in zip(("low", "high"), interval)}
    return {f"{PREFIX}{name}": value for name, value in {**values, **bounds}.items() if value is not None}


def _log(run: Run, comparison: ControllerComparison, step: int | None, directory: Path) -> None:
    import wandb

    rows = [asdict(row) for row in comparison.rows]
    metrics = budget_metrics(comparison)
    of_step = {} if step is None else {"global_step": step}  # as in every run of the project
    for name in metrics[0]:  # one by one, because `*` already has another axis
        run.define_metric(name, step_metric=None if name == AXIS else AXIS)
    for values in metrics:
        run.log({**values, **of_step})
    table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
    run.log({f"{PREFIX}rows": table, f"{PREFIX}pareto": wandb.Image(str(directory / PARETO_PLOT)), **of_step})
    run.summary.update(summary_metrics(comparison))
