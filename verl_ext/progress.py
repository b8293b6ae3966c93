"""The one bar for all work that takes longer than a moment: how much is done, and the time that is left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

Item = TypeVar("Item")


def progress_bar(
    items: Iterable[Item] | None = None, *, desc: str, unit: str, show: bool = True, **settings: Any
) -> tqdm[Item]:
    """A tqdm bar on standard error where that is a terminal, and none elsewhere: a log file needs no moving picture.

    Args:
        items: what to go through; None for a bar that is moved by `update`.
        desc: what is being done, such as `tokenising`.
        unit: what is counted, in the plural, such as `chats`; `B` counts bytes.
        show: whether this process is the one that shows it.
        settings: others of tqdm, such as `total`, `initial` and `leave`.
    """
    from tqdm import tqdm  # here, so that --help needs no package

    if unit == "B":
        settings |= {"unit_scale": True, "unit_divisor": 1024}
    else:
        unit = f" {unit}"
    disable = None if show else True
    return tqdm(items, desc=desc, unit=unit, disable=disable, dynamic_ncols=True, mininterval=0.5, **settings)
