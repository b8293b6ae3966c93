"""Makes the model and data that a recipe prepares itself, where they are missing."""

from __future__ import annotations

import fcntl
import shlex
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.checkpoint.lock import take
from verl_ext.data.prepare import is_prepared, prepare

PREPARE_LOCK = Path(__file__).resolve().parents[2] / ".prepare.lock"


def prepare_inputs(config: DictConfig) -> None:
    """Run each command of the recipe's `prepare` list whose result is not there yet.

    Raises:
        UserError: a command that does not exist or cannot do its work.
    """
    for command in config.prepare:
        words = shlex.split(command)
        if not is_prepared(words):
            # Several launches, or nodes, at once: the others wait and find it done.
            with PREPARE_LOCK.open("w") as lock:
                take(lock, fcntl.LOCK_EX)
                if not is_prepared(words):
                    print(f"Preparing: {command}", flush=True)
                    prepare(words)
