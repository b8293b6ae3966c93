"""What holds from the first import of a command on, before its `main` can see to it."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType

OURS = ("verl_ext", "eval_pipeline", "benchmarks", "tests")


def begin_quietly() -> None:
    """Where a command is being started by `python -m`: neither Ctrl-C nor a missing package leaves a traceback.

    Imports take a moment, with torch seconds, and a Ctrl-C then simply ends the process. A rank of torchrun is no
    command that somebody types; its tracebacks stay.
    """
    is_typed = sys.argv[:1] == ["-m"]  # as Python has it while it looks for the module to run
    if not is_typed or "TORCHELASTIC_RUN_ID" in os.environ:
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = _tell_of_missing_package


def _tell_of_missing_package(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    if name is None or name.partition(".")[0] in OURS:
        sys.__excepthook__(kind, error, traceback)
        return
    print(
        f"error: {sys.executable} has no package {name}; use .venv/bin/python, which `bash run_sft.sh` creates, or a "
        "Python with the packages in requirements/",
        file=sys.stderr,
    )
    raise SystemExit(2)
