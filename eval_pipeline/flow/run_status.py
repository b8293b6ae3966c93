"""What the training run is at, told when it changes."""

from __future__ import annotations

from pathlib import Path

from verl_ext.console import warn
from verl_ext.metrics.run_record import RUN_FILE, load_run

_WAITING = {
    "waiting": "the run in {run_dir} has not been started yet; waiting for its first checkpoint (Ctrl-C ends this)",
    "stopped": "the run was stopped; waiting for it to resume (Ctrl-C ends this)",
    "failed": "the run has failed; waiting for it to resume (Ctrl-C ends this)",
}


class RunStatus:
    """Asks the run record.

    Args:
        run_dir: of the run.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._told = ""

    def has_finished(self) -> bool:
        """Whether no further checkpoint will come.

        Raises:
            UserError: the record cannot be read.
        """
        run = load_run(self._run_dir / RUN_FILE)
        status = run["status"]
        is_starting = status == "waiting" and run["project"] is not None  # its launcher has entered it
        if status != self._told and status in _WAITING and not is_starting:
            warn(_WAITING[status].format(run_dir=self._run_dir))
        self._told = status
        return status == "finished"
