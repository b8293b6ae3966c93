"""How numbers and tables look on the terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def human_bytes(num_bytes: float) -> str:
    """A size in the unit that suits it, such as `1.5 GiB`."""
    power = 0
    while num_bytes >= 1024 and power < len(UNITS) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.1f} {UNITS[power]}" if power else f"{num_bytes:.0f} B"


def local_time(seconds: float | None) -> str:
    """Seconds since 1970 as date and time of this machine's zone; `-` for none."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "-"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
