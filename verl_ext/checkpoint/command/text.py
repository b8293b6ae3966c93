"""How sizes and times look on the terminal."""

from __future__ import annotations

import time

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
