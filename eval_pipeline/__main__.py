"""Command line of the evaluation: `python -m eval_pipeline COMMAND`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from eval_pipeline.command import check, judge, report, retry, run, status, watch
from eval_pipeline.command.arguments import PROGRAM
from eval_pipeline.command.paths import input_path
from verl_ext.cli import FAILURES, CommandParser, add_commands, clean_exit
from verl_ext.controller.evaluation import command as adaptive


def build_parser() -> CommandParser:
    """The commands with their options and help."""
    parser = CommandParser(
        prog=PROGRAM,
        description="Evaluate checkpoints: vLLM answers problems, a sandbox judges the answers, and the best "
        "checkpoint is chosen.",
        examples=[
            f"{PROGRAM} watch checkpoints/rlvr_coding_model/sft_quickstart",
            f"{PROGRAM} run --checkpoint models/mine --recipe humaneval",
        ],
        notes="See docs/evaluation.md.",
        exit_codes={"0": "done", "1": "an evaluation failed", **FAILURES},
    )
    commands = add_commands(parser)
    for command in (watch, run, report, status, retry, judge, check, adaptive):
        command.register(commands)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; `key=value` may stand anywhere, which argparse alone does not allow."""
    parser = build_parser()
    arguments, rest = parser.parse_known_args(argv)
    if "overrides" in arguments:
        words = [*arguments.overrides, *rest]
        if "directory" in arguments and "=" in arguments.directory:  # an override took its place
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
        argv: arguments without the program's name; None takes the process's own.

    Raises:
        SystemExit: always, with the command's exit code; 2 after bad input, 75 after a request to stop.
    """
    with clean_exit():
        arguments = parse(argv)
    with clean_exit(arguments.typed_again):
        raise SystemExit(arguments.action(arguments))


if __name__ == "__main__":
    main()
