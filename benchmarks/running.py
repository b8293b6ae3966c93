"""Commands whose figures a benchmark reads."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from verl_ext.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def run(command: Sequence[str | Path], **variables: str) -> str:
    """Standard output of a command that ends well, started in the root of the checkout and without a network.

    Args:
        command: its words.
        variables: of the environment, beside those that are set.

    Raises:
        UserError: it did not end well.
    """
    environment = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", **os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(map(str, command[:6]))} ended with {done.returncode}: {reason_of(done)}")
    return done.stdout


def reason_of(done: subprocess.CompletedProcess[str]) -> str:
    """Why a command failed, in a line: its first error, as torchrun ends with a table; else its last line."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines()]
    told = [line for line in lines if any(map(str.isalnum, line))]
    return next((line for line in told if "Error" in line), told[-1] if told else f"exit code {done.returncode}")
