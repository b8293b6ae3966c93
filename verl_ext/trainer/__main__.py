"""What torchrun starts on every rank: `python -m verl_ext.trainer CONFIG.yaml`."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

from verl_ext.cli import child_process_args
from verl_ext.commands import program
from verl_ext.errors import USER_ERROR_EXIT_CODE, UserError
from verl_ext.metrics.startup import process_start, startup
from verl_ext.processes import LAUNCHER_PID, defer_gc, end_with_parent
from verl_ext.trainer.stages import STAGES, RunConfig, read_config
from verl_ext.trainer.stop_signals import end_at_once


def main() -> None:
    """Train the stage of the configuration; a `UserError` goes to the launcher, which prints it once."""
    [path] = child_process_args("verl_ext.trainer", "Trains as one rank of torchrun.", f"{program('sft')} 2", "config")
    die_with_launcher()
    end_at_once()
    startup.go_on(Path(path).parent)
    startup.mark("torchrun", process_start())
    config = read_config(Path(path))
    try:
        train(config)
    except UserError as error:
        tell_launcher(str(error))
        sys.exit(USER_ERROR_EXIT_CODE)


def die_with_launcher() -> None:
    """Have the kernel kill this rank when its launcher dies.

    torchrun gives each rank a session of its own, so a launcher killed by SIGKILL would leave ranks that go on training
    into a run directory which the next start of the same command takes over.
    """
    launcher = int(os.environ.get(LAUNCHER_PID, os.getppid()))
    end_with_parent()
    if os.getppid() != launcher:  # it died before the kernel was told, maybe while this interpreter started
        os._exit(1)


def tell_launcher(message: str) -> None:
    """Leave a message in the file that torchrun reads after a rank has failed."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        print(f"error: {message}", file=sys.stderr)
    else:
        Path(path).write_text(json.dumps({"message": message}))


def train(config: RunConfig) -> None:
    """Import what the stage needs, train, and leave with the code of what stopped it."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    with defer_gc():
        from verl_ext.trainer.rank import run_rank

        STAGES[config.stage].trainer_class()
    startup.mark("imports")
    sys.exit(run_rank(config))


if __name__ == "__main__":
    main()
