"""The comparison for people: on the console, and in Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eval_pipeline.adaptive.compare import Comparison
from eval_pipeline.adaptive.results import Row
from eval_pipeline.report.report import markdown_table
from verl_ext.console import text_table
from verl_ext.controller.space import ConfigurationSpace

HEADER = ("method", "budget ms", "accuracy", "latency ms", "p50", "p95", "violations", "complexity")
Table = list[list[str]]


def console_text(comparison: Comparison) -> str:
    """The accuracies by budget, the methods over all budgets, and what it comes to."""
    blocks = [
        "accuracy in %, behind it the violations of the budget where there are any",
        text_table(by_budget(comparison)),
        "over all budgets",
        text_table(over_budgets(comparison)),
        *summary_lines(comparison),
    ]
    return "\n".join(blocks)


def markdown_text(
    comparison: Comparison, space: ConfigurationSpace, about: Mapping[str, Any], plots: Mapping[str, Path]
) -> str:
    """The page.

    Args:
        comparison: what was found.
        space: of the configurations.
        about: what it was made by.
        plots: PNG files beside the page, by what they show.
    """
    protocol, machine = about["protocol"], about["machine"]
    shown = ([f"`{name}`", str(value)] for name, value in {**protocol, **machine}.items())
    blocks = [
        "# The controller and what it is measured against",
        f"`{about['checkpoint']}` for `{about['vlm']['path']}`",
        *summary_lines(comparison),
        *(f"![{shown}]({path.name})" for shown, path in plots.items()),
        "## Over all budgets",
        markdown_table(*split_header(over_budgets(comparison))),
        "## By budget",
        markdown_table(HEADER, (row_cells(row) for row in comparison.rows)),
        "## Lookup table",
        markdown_table(("budget ms", *STATIC), lookup_rows(comparison, space)),
        "## Pareto front of the static configurations",
        markdown_table((*STATIC, "accuracy", "latency ms"), front_rows(comparison, space)),
        "## Protocol",
        markdown_table(("setting", "value"), shown),
    ]
    return "\n\n".join(blocks) + "\n"


def by_budget(comparison: Comparison) -> Table:
    """A line for each budget, a column for each method."""
    cells = {
        name: [
            f"{100 * accuracy:.1f}" + (f" ({100 * late:.0f} % late)" if late else "")
            for accuracy, late in zip(results.accuracy.mean(0), comparison.violation_rates(name))
        ]
        for name, results in comparison.methods.items()
    }
    budgets = [f"{budget:.1f}" for budget in comparison.budgets_ms]
    return [["budget ms", *cells], *(list(line) for line in zip(budgets, *cells.values()))]


def over_budgets(comparison: Comparison) -> Table:
    """A line for each method: means over samples and budgets, and the worst violation rate."""
    lines = [["method", "accuracy", "latency ms", "violations", "worst", "complexity"]]
    for name, results in comparison.methods.items():
        rates = comparison.violation_rates(name)
        means = [part.mean() for part in results.parts]
        late = [f"{100 * rate:.1f} %" for rate in (rates.mean(), rates.max())]
        lines.append([name, f"{100 * means[0]:.1f} %", f"{means[1]:.1f}", *late, f"{means[2]:.3f}"])
    return lines


def summary_lines(comparison: Comparison) -> list[str]:
    """What it comes to, in sentences."""
    found = comparison.summary
    gain = f"controller - lookup table: {100 * found.controller_minus_lookup_table:+.2f} points"
    if found.interval is not None:
        low, high = (f"{100 * bound:+.2f}" for bound in found.interval)
        gain += f", 95 % interval [{low}, {high}]"
    gap = "the oracle is nowhere a point better than the lookup table, so there is no gap to close"
    if found.gap_closed is not None:
        gap = (
            f"share of the gap from the lookup table to the oracle that it closes: {100 * found.gap_closed:.1f} % "
            f"({found.num_gap_budgets} of {len(comparison.budgets_ms)} budgets have one)"
        )
    late = f"{100 * found.worst_violation_rate:.1f} % at {found.worst_violation_budget_ms:.1f} ms"
    parts = f"features {found.features_ms:.2f}, network {found.network_ms:.2f}, choice {found.choice_ms:.2f}"
    share = f"the network is {100 * found.network_share:.2f} % of the full model's {found.full_ms:.1f} ms"
    lines = [gain, gap, f"worst violation rate: {late}", f"deciding: {found.decision_ms:.2f} ms ({parts}); {share}"]
    again = f"measured again, because something else had the processor: {100 * found.measured_again:.1f} % of the runs"
    return [*lines, again] if found.measured_again else lines


STATIC = ("tier", "blocks", "top-k")


def static_cells(comparison: Comparison, space: ConfigurationSpace, place: int) -> list[str]:
    """The `STATIC` cells of a static configuration; its top-k is that of the blocks behind the first."""
    each = comparison.statics[place]
    topk = max(each.topk[1:], default=0) or space.full_topk
    return [space.tiers[each.tier], f"{each.num_active} of {len(each.blocks)}", str(topk) if each.topk else "-"]


def lookup_rows(comparison: Comparison, space: ConfigurationSpace) -> Table:
    """A line for each budget."""
    entries = zip(comparison.budgets_ms, comparison.table)
    return [[f"{budget:.1f}", *static_cells(comparison, space, place)] for budget, place in entries]


def front_rows(comparison: Comparison, space: ConfigurationSpace) -> Table:
    """A line for each configuration of the front."""
    accuracy, latency, _ = (part.mean(0) for part in comparison.measured.statics.parts)
    return [
        [*static_cells(comparison, space, place), f"{100 * accuracy[place]:.1f} %", f"{latency[place]:.1f}"]
        for place in comparison.front
    ]


def row_cells(row: Row) -> list[str]:
    """A row as text."""
    times = (row.latency_ms_mean, row.latency_ms_p50, row.latency_ms_p95)
    shares = [f"{100 * row.accuracy:.1f} %", f"{100 * row.violation_rate:.1f} %"]
    figures = [shares[0], *(f"{time:.1f}" for time in times), shares[1], f"{row.complexity:.3f}"]
    return [row.method, f"{row.budget_ms:.1f}", *figures]


def split_header(table: Table) -> tuple[list[str], Table]:
    """The first line, and the others."""
    return table[0], table[1:]
