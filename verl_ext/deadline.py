"""When this machine goes away, from the configuration or from the environment. Standard library only."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import datetime

from verl_ext.errors import UserError

# Those that verl's should_save_ckpt_esi knows: Volcano Engine's machine learning platform, and SageMaker.
ENVIRONMENT = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)


def parse_deadline(value: object) -> float | None:
    """Read a value of `trainer.preemption.deadline`.

    Args:
        value: None, seconds since 1970 (a number, or text of one), or ISO 8601 text with a time zone.

    Returns:
        Seconds since 1970, None for None.

    Raises:
        UserError: it is anything else.
    """
    if value is None:
        return None
    seconds = to_seconds(value)
    if seconds is None:
        raise UserError(
            f"trainer.preemption.deadline is {value!r}; give seconds since 1970, or a time with its zone such as "
            "2030-01-31T18:00:00+01:00"
        )
    return seconds


def to_seconds(value: object) -> float | None:
    """Seconds since 1970 of a number, of the text of one, or of ISO 8601 text with a time zone; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
        return seconds if math.isfinite(seconds) else None
    except ValueError:
        return seconds_of_iso(str(value).strip())


def seconds_of_iso(text: str) -> float | None:
    """Seconds since 1970 of ISO 8601 text; None where it is malformed or names no time zone."""
    try:
        moment = datetime.fromisoformat(text.upper())  # which reads Z, but not z
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo is not None else None


def deadline_from_environment(warn: Callable[[str], None]) -> float | None:
    """The earliest time in the future at which a cloud says that it will take this machine back.

    Args:
        warn: receives a sentence for each variable that cannot be read.

    Returns:
        Seconds since 1970, None when no variable names a time to come.
    """
    times = []
    for name in ENVIRONMENT:
        text = os.environ.get(name, "")
        seconds = to_seconds(text)
        if text and seconds is None:
            warn(f"{name} is '{text}' instead of seconds since 1970, so this run does not heed it")
        if seconds is not None and seconds > time.time():
            times.append(seconds)
    return min(times, default=None)
