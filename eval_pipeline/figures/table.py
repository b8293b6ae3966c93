"""Figures as tables, for the terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from eval_pipeline.figures.evaluated import DatasetResult
from eval_pipeline.figures.intervals import Interval
from verl_ext.console import text_table


def format_table(datasets: Mapping[str, DatasetResult]) -> str:
    """Figures by row and data sets by column, each value with its interval; a figure that does not exist is a dash.

    Args:
        datasets: result by name of the data set, at least one.
    """
    names = list(dict.fromkeys(name for result in datasets.values() for name in result.figures))
    columns = [["", *names]] + [[name, *_cells(result, names)] for name, result in datasets.items()]
    return text_table(list(zip(*columns, strict=True)))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_value(value: float | int | None, interval: Interval | None = None) -> str:
    """A figure with four decimals, whole numbers as they are, and its interval behind it in brackets."""
    if value is None:
        return "-"
    text = str(value) if isinstance(value, int) else f"{value:.4f}"
    return text if interval is None else f"{text} [{interval[0]:.4f}, {interval[1]:.4f}]"


def _cells(result: DatasetResult, names: list[str]) -> list[str]:
    return [format_value(result.figures.get(name), result.intervals.get(name)) for name in names]
