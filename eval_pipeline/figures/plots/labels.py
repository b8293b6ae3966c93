"""Labels beside points, as many as have room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# where a label may be, in points from its point, with the alignment that goes with it
_PLACES = [
    ((6, 4), "left", "bottom"),
    ((6, -4), "left", "top"),
    ((-6, 4), "right", "bottom"),
    ((-6, -4), "right", "top"),
]
_POINT_RADIUS = 5.0  # pixels


def label_points(axes: Axes, x: NDArray[np.float64], y: NDArray[np.float64], labels: Sequence[str]) -> None:
    """Write a label beside each point, the last first; one that would cover another label or a point is left out.

    Args:
        axes: with the limits that they will keep.
        x: of each point, in data coordinates.
        y: of each point, in data coordinates.
        labels: of each point.
    """
    from matplotlib.transforms import Bbox

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()  # labels have no size before the panels have their places
    pixels = axes.transData.transform(np.column_stack([x, y]))
    taken = [Bbox([point - _POINT_RADIUS, point + _POINT_RADIUS]) for point in pixels]
    for place in sorted(range(len(labels)), key=lambda index: (index != 0, -index)):
        _place(axes, (x[place], y[place]), labels[place], taken)


def _place(axes: Axes, point: tuple[float, float], label: str, taken: list) -> None:
    for offset, horizontal, vertical in _PLACES:
        text = axes.annotate(
            label, point, xytext=offset, textcoords="offset points", ha=horizontal, va=vertical, fontsize="x-small"
        )
        box = text.get_window_extent()
        if axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max) and not box.count_overlaps(taken):
            taken.append(box)
            return
        text.remove()
