"""One side of a benchmark, as a process or a rank of torchrun: `python -m benchmarks.side NAME WORD ...`.

The benchmarks start it, each side with a file that says what to do.
"""

from __future__ import annotations

import faulthandler
import importlib
import os

from verl_ext.cli import CommandParser, clean_exit

SIDES = ("gpu_correctness", "gpu_speed", "grpo_peer", "plan_rank", "sft_bare", "sft_peer", "sft_stock")
"""Modules with a function `main(words)`."""

STACKS_AFTER_S = "VERL_EXT_STACKS_AFTER_S"
"""Environment variable: seconds after which a side prints the stacks of its threads, to explain a hang."""


@clean_exit()
def main() -> None:
    """Import the side, which may need packages that only its own start has, and run it."""
    parser = CommandParser(
        prog="python -m benchmarks.side",
        description=__doc__ or "",
        examples=["python -m benchmarks.sft --quick", "python -m benchmarks.side sft_bare job.json"],
    )
    parser.add_argument("name", choices=SIDES, metavar="NAME", help=", ".join(SIDES))
    parser.add_argument("words", nargs="+", metavar="WORD", help="what the side is told, mostly a job's file")
    arguments = parser.parse_args()
    if STACKS_AFTER_S in os.environ:
        faulthandler.dump_traceback_later(float(os.environ[STACKS_AFTER_S]))
    importlib.import_module(f"benchmarks.{arguments.name}").main(arguments.words)


if __name__ == "__main__":
    main()
