"""Command line of the evaluation: `python -m eval_pipeline run --checkpoint DIR`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl_ext.errors import exit_on_user_error

EXAMPLE = """example:
  python -m eval_pipeline run --checkpoint checkpoints/demo/sft/global_step_20 --problems data/quickstart/problems.jsonl

A global_step_N directory is judged by its huggingface/ export, and config.yaml beside it names the problems and the W&B
project. The figures go to <run>/eval/eval_step_N/metrics.json; for any other model directory, to eval_<name> beside it.
"""


def build_parser() -> argparse.ArgumentParser:
    """The command's options and help."""
    parser = argparse.ArgumentParser(
        prog="python -m eval_pipeline",
        description="Judge a checkpoint by running its greedy answers to programming problems.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands)
    return parser


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    run = commands.add_parser(
        "run",
        help="judge one checkpoint",
        description="Answer every problem greedily, run each answer against its tests, write the figures.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="global_step_N or a model directory")
    run.add_argument("--problems", type=Path, metavar="FILE", help="problems JSONL (default: the run's own)")
    run.add_argument("--limit", type=_positive, metavar="N", help="judge only the first N problems")
    run.add_argument("--max-tokens", type=_positive, default=2048, metavar="N", help="tokens an answer (default: 2048)")
    run.add_argument("--output", type=Path, metavar="DIR", help="where metrics.json goes (default: see below)")
    run.add_argument("--no-wandb", action="store_true", help="send nothing to W&B")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


# argparse names the type function in its message for text that is no number
_positive.__name__ = "whole number"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Raises:
        SystemExit: with code 2 after bad input, which is explained on standard error.
    """
    arguments = build_parser().parse_args(argv)
    with exit_on_user_error():
        # imported here, so that --help need not wait for it
        from eval_pipeline.evaluate import Options, evaluate

        evaluate(
            Options(
                checkpoint=arguments.checkpoint,
                problems=arguments.problems,
                limit=arguments.limit,
                max_tokens=arguments.max_tokens,
                output=arguments.output,
                wandb=not arguments.no_wandb,
            )
        )


if __name__ == "__main__":
    main()
