"""What an argument of a command may be; a mistake is told before any work begins."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class WholeNumber:
    """The type of an argument that is a whole number.

    Attributes:
        least: the smallest that is taken.
        most: the largest, None for any.
    """

    least: int = 1
    most: int | None = None

    def __call__(self, text: str) -> int:
        """The number that was typed; argparse tells of an `ArgumentTypeError`."""
        value = int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
        if value is None or value < self.least or (self.most is not None and value > self.most):
            bounds = f"of {self.least} or more" if self.most is None else f"from {self.least} to {self.most}"
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number {bounds}")
        return value


@dataclass(frozen=True)
class Number:
    """The type of an argument that is a number above one bound and below another.

    Attributes:
        above: what it must be more than.
        below: what it must be less than.
        closed: whether the bounds themselves are taken too.
    """

    above: float = 0.0
    below: float = math.inf
    closed: bool = False

    def __call__(self, text: str) -> float:
        """The number that was typed; argparse tells of an `ArgumentTypeError`."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        on_bound = self.closed and value in (self.above, self.below)
        if not (on_bound or self.above < value < self.below):
            bounds = f"above {self.above:g}" if self.below == math.inf else f"between {self.above:g} and {self.below:g}"
            raise argparse.ArgumentTypeError(f"'{text}' is not a number {bounds}")
        return value


def output_file(text: str) -> Path:
    """The type of an argument that names a file to write; what cannot be written is refused before the work is done."""
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a directory; name a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written; name a file in a directory that is there")
    return path
