"""Shared parts of plots: colors, panels, axes, labels next to points, and atomic writes of figures.

matplotlib is imported inside functions, because it takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from eval_pipeline.judge import ErrorType
from verl_ext.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which is distinguishable with every form of color blindness
BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, GRAY = "#56B4E9", "#CC79A7", "#595959"

ERROR_COLORS: dict[ErrorType, str] = {
    "success": GREEN,
    "wrong_answer": ORANGE,
    "syntax_error": SKY,
    "runtime_error": VERMILLION,
    "timeout": PURPLE,
    "api_error": GRAY,
}

_PANEL_INCHES = (6.2, 4.0)
_LEGEND_INCHES = 0.9
_DPI = 130

# candidate positions of a label: offset from its point in points, and alignment
_LABEL_POSITIONS = [
    ((6, 4), "left", "bottom"),
    ((6, -4), "left", "top"),
    ((-6, 4), "right", "bottom"),
    ((-6, -4), "right", "top"),
]
_POINT_RADIUS = 5.0  # pixels


def panels(names: Sequence[str], title: str) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per name, two in a row.

    Args:
        names: titles of the panels, at least one.
    """
    from matplotlib.figure import Figure

    num_columns = min(len(names), 2)
    num_rows = -(-len(names) // num_columns)
    width, height = _PANEL_INCHES
    size = (max(width * num_columns, 8.0), height * num_rows + _LEGEND_INCHES)
    figure = Figure(figsize=size, layout="constrained")
    grid = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    figure.suptitle(title)
    for axes, name in zip(grid, names):
        axes.set_title(name, fontsize="medium", pad=14)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for unused in grid[len(names) :]:
        unused.remove()
    return figure, grid[: len(names)]


def percent_axis(axes: Axes, label: str, margin: float = 0.02) -> None:
    """A y axis for shares, from 0 to 100%, with a margin so that markers at the ends are not cut off."""
    from matplotlib.ticker import PercentFormatter

    axes.set_ylim(-margin, 1 + margin)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_ylabel(label)


def step_axis(axes: Axes, steps: Sequence[int]) -> None:
    """An x axis of ascending integer steps, each with a tick if there is room."""
    from matplotlib.ticker import FixedLocator, MaxNLocator

    span = max(steps) - min(steps)
    gaps = [after - before for before, after in zip(steps, steps[1:])]
    has_room = min(gaps, default=span) >= 0.12 * span
    axes.xaxis.set_major_locator(FixedLocator(steps) if has_room else MaxNLocator(integer=True))
    margin = max(0.04 * span, 0.5)
    axes.set_xlim(min(steps) - margin, max(steps) + margin)
    axes.set_xlabel("optimizer step")


def legend_below(figure: Figure, all_axes: Sequence[Axes], max_columns: int) -> None:
    """One legend below all panels, with the entries of every panel."""
    entries = {
        label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    num_columns = min(max_columns, 3 * len(all_axes))
    figure.legend(
        entries.values(), entries, loc="outside lower center", ncols=num_columns, frameon=False, fontsize="small"
    )


def write_figure(figure: Figure, path: Path) -> Path:
    """Replace a PNG file.

    Raises:
        OSError: the disk is full or the directory is not writable.
    """
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=_DPI)
    return path


def label_points(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], labels: Sequence[str]) -> None:
    """Write a label next to each point; a label that would cover another label or a point is skipped.

    The first point has priority, then the last ones.

    Args:
        axes: axes with their final limits.
        x: coordinate of each point, in data units.
        y: coordinate of each point, in data units.
        labels: one label per point.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # a label has no size before the layout is known
    pixels = axes.transData.transform(np.column_stack([x, y]))
    taken = [Bbox([point - _POINT_RADIUS, point + _POINT_RADIUS]) for point in pixels]
    for index in sorted(range(len(labels)), key=lambda index: (index != 0, -index)):
        _place_label(axes, (x[index], y[index]), labels[index], taken)


def _place_label(axes: Axes, point: tuple[float, float], label: str, taken: list) -> None:
    for offset, horizontal, vertical in _LABEL_POSITIONS:
        text = axes.annotate(
            label, point, xytext=offset, textcoords="offset points", ha=horizontal, va=vertical, fontsize="x-small"
        )
        box = text.get_window_extent()
        if axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) and not box.count_overlaps(taken):
            taken.append(box)
            return
        text.remove()
