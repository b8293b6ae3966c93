"""Command line of the evaluation: `python -m eval_pipeline COMMAND`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eval_pipeline.commands import (
    PROGRAM,
    add_check,
    add_report,
    add_retry,
    add_run,
    add_status,
    add_watch,
    input_path,
)
from eval_pipeline.judge_command import add_judge
from verl_ext.cli import FAILURES, CommandParser, add_commands, clean_exit
from verl_ext.controller.evaluation.command import add_adaptive


def build_parser() -> CommandParser:
    """Build the parser with all commands."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Evaluate checkpoints: generate answers with vLLM, judge them in a sandbox, and select the best "
        "checkpoint.",
        examples=[
            f"{PROGRAM} watch checkpoints/rlvr_coding_model/sft_quickstart",
            f"{PROGRAM} run --checkpoint models/mine --recipe humaneval",
        ],
        notes="See docs/guides/evaluation.md.",
        exit_codes={"0": "done", "1": "an evaluation failed", **FAILURES},
    )
    commands = add_commands(parser)
    for add in (add_watch, add_run, add_report, add_status, add_retry, add_judge, add_check, add_adaptive):
        add(commands)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Unlike in plain argparse, `key=value` can appear anywhere."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if "overrides" in arguments:
        words = [*arguments.overrides, *rest]
        if "directory" in arguments and "=" in arguments.directory:  # an override came first
            words.insert(0, arguments.directory)
            arguments.directory = words.pop(next((i for i, word in enumerate(words) if "=" not in word), 0))
        arguments.overrides = [word for word in words if _is_override(word)]
        rest = [word for word in words if word not in arguments.overrides]
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "directory" in arguments:
        arguments.directory = input_path(arguments.directory)
    return arguments


def _is_override(word: str) -> bool:
    return "=" in word and not word.startswith("-") or word.startswith("~")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        argv: arguments without the program name; None uses `sys.argv[1:]`.

    Raises:
        SystemExit: always, with the exit code of the command; 2 after bad input, 75 after a stop signal.
    """
    with clean_exit():
        arguments = parse(argv)
    with clean_exit(arguments.typed_again):
        raise SystemExit(arguments.action(arguments))


if __name__ == "__main__":
    main()
