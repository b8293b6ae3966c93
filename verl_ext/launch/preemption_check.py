"""Refuses a time to save or a deadline that cannot work."""

from __future__ import annotations

import math
import time

from omegaconf import DictConfig

from verl_ext.deadline import parse_deadline
from verl_ext.errors import UserError


def check_preemption(config: DictConfig) -> None:
    """Refuse values of `trainer.preemption` that cannot work.

    Raises:
        UserError: the key, its value and what it may be.
    """
    preemption = config.trainer.preemption
    check_grace(preemption.grace_s)
    deadline = parse_deadline(preemption.deadline)
    if deadline is not None and deadline <= time.time():
        raise UserError(
            f"trainer.preemption.deadline is {preemption.deadline}, which is past; give the time at which this "
            "machine goes away, or null"
        )


def check_grace(seconds: object) -> None:
    """`grace_s` must be a number above 0."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
        raise UserError(
            f"trainer.preemption.grace_s is {seconds!r}; it must be a number of seconds above 0, long enough for a save"
        )
