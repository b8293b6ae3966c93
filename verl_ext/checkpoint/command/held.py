"""What may not be removed even by hand, and how to lift that."""

from __future__ import annotations

from pathlib import Path

from verl_ext.checkpoint.command.run_directory import newest_resumable
from verl_ext.checkpoint.layout import BEST, KEEP
from verl_ext.checkpoint.lease import lease_holders
from verl_ext.checkpoint.retention import read_choice
from verl_ext.errors import UserError


def require_free(run_dir: Path, checkpoints: list[Path]) -> None:
    """Refuse the whole request when one of the checkpoints is held.

    Raises:
        UserError: which one, by what, and how to lift it.
    """
    newest = newest_resumable(run_dir)
    chosen, problem = read_choice(run_dir)
    if problem:
        raise UserError(f"{run_dir / BEST} {problem}, so it may name any checkpoint; repair or delete it")
    for path in checkpoints:
        if (path / KEEP).exists():
            raise UserError(f"{path.name} holds a file '{KEEP}'; delete {path / KEEP} first")
        if holders := lease_holders(path):
            raise UserError(f"{path.name} is read by {', '.join(holders)}; wait for it or stop it")
        if path == chosen:
            raise UserError(f"{path.name} is what {run_dir / BEST} names; choose another there, or delete it, first")
        if path == newest:
            raise UserError(
                f"{path.name} is what the run would resume from; save a newer one first, "
                f"or delete {run_dir} to give up the run"
            )
