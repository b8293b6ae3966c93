"""What the plots share: colours, panels, axes of steps and of percent, and how a figure is written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eval_pipeline.judge import ErrorType
from verl_ext.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, whose colours are told apart with any form of colour blindness
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GREY = "#56B4E9", "#CC79A7", "#595959"

ERROR_COLOURS: dict[ErrorType, str] = {
    "success": GREEN,
    "wrong_answer": ORANGE,
    "syntax_error": SKY,
    "runtime_error": VERMILLION,
    "timeout": PURPLE,
    "api_error": GREY,
}

_PANEL_INCHES = (6.2, 4.0)
_LEGEND_INCHES = 0.9
_DPI = 130


def panels(names: Sequence[str], title: str) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each name, two in a row, and room for a legend below.

    Args:
        names: titles of the panels, at least one.
        title: of the whole.
    """
    from matplotlib.figure import Figure

    num_columns = min(len(names), 2)
    num_rows = -(-len(names) // num_columns)
    width, height = _PANEL_INCHES
    size = (max(width * num_columns, 8.0), height * num_rows + _LEGEND_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(num_rows, num_columns, squeeze=False).flat
    figure.suptitle(title)
    axes = list(_titled(grid, names))
    for unused in list(grid)[len(names) :]:
        unused.remove()
    return figure, axes


def _titled(grid: Iterable[Axes], names: Sequence[str]) -> Iterator[Axes]:
    for axes, name in zip(grid, names):
        axes.set_title(name, fontsize="medium", pad=14)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        yield axes


def percent_axis(axes: Axes, label: str, margin: float = 0.02) -> None:
    """A y axis from 0 to 100 % for shares, and a margin so that points at the ends are seen whole."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-margin, 1 + margin)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel(label)


def step_axis(axes: Axes, steps: Sequence[int]) -> None:
    """An x axis of ascending steps, which are whole numbers; all are marked where there is room."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    span = max(steps) - min(steps)
    gaps = [after - before for before, after in zip(steps, steps[1:])]
    has_room = min(gaps, default=span) >= 0.12 * span
    axes.xaxis.set_major_locator(FixedLocator(steps) if has_room else MaxNLocator(integer=True))
    margin = max(0.04 * span, 0.5)
    axes.set_xlim(min(steps) - margin, max(steps) + margin)
    axes.set_xlabel("optimizer step")


def legend_below(figure: Figure, all_axes: Sequence[Axes], most_columns: int) -> None:
    """One legend for all panels, with each entry that is in any of them."""
    entries = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    num_columns = min(most_columns, 3 * len(all_axes))
    figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=num_columns, frameon=False, fontsize="small"
    )


def write_figure(figure: Figure, path: Path) -> Path:
    """Write a PNG whole or not at all.

    Raises:
        OSError: the disk is full or the directory not writable.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=_DPI)
    return path
