"""Keeps the checkpoint that is being evaluated on the disk while its run trains on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from eval_pipeline.models.checkpoint import Checkpoint
from verl_ext.checkpoint.lease import hold_lease
from verl_ext.console import warn
from verl_ext.errors import UserError


@contextmanager
def held(checkpoint: Checkpoint) -> Iterator[None]:
    """Lease a run's checkpoint until the end of the block; a model that no run saved needs none.

    Raises:
        UserError: rotation has just removed the checkpoint.
    """
    with ExitStack() as stack:
        if checkpoint.run_dir is not None:
            try:
                stack.enter_context(hold_lease(checkpoint.path))
            except FileNotFoundError as error:
                raise UserError(f"{checkpoint.path} has just been removed; name a newer checkpoint") from error
            except OSError as error:
                warn(
                    f"cannot lock {checkpoint.path} ({error.strerror}); "
                    "a running training may remove it during the evaluation"
                )
        yield
