"""The one bar for all work that takes longer than a moment: how much is done, and the time that is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
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


@contextmanager
def staged(expected_s: Mapping[str, float]) -> Iterator[Callable[[str], None]]:
    """A bar over work of several parts, none of which tells how far it is.

    Args:
        expected_s: seconds that each part takes, about; their shares place the bar.

    Yields:
        What to call with the name of each part when it begins.
    """
    form = "{desc}{percentage:3.0f}%|{bar}| {elapsed}<{remaining}"
    begun: list[str] = []
    total, desc = sum(expected_s.values()), f"{next(iter(expected_s))}: "
    with progress_bar(total=total, desc=desc, unit="s", bar_format=form) as bar:

        def begin(name: str) -> None:
            bar.update(sum(expected_s[done] for done in begun[-1:]))
            bar.set_description(name)
            begun.append(name)

        yield begin
        bar.update(bar.total - bar.n)


def restrict_bars_of_transformers() -> None:
    """Have transformers draw a bar on rank 0 alone, and only where standard error is a terminal.

    It draws one for each model that it loads or saves. The bars of downloads are those of huggingface_hub and stay.
    """
    if _BeforeModels not in sys.meta_path:
        sys.meta_path.insert(0, _BeforeModels)


class _BeforeModels:
    """Sets the hook when transformers' models are first imported, which takes seconds; it finds no module itself."""

    @classmethod
    def find_spec(
        cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """No spec: the search continues with the other finders."""
        if name == "transformers.modeling_utils":
            from transformers.utils import logging

            logging.set_tqdm_hook(_restricted)
        return None


def _restricted(factory: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    disable = None if os.environ.get("RANK", "0") == "0" else True
    return factory(*args, **{**settings, "disable": disable})
