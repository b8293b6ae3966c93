"""`python -m verl_ext.plan recipe=NAME gpus=8 [key=value ...]`: does it fit, how long does a step take, and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from verl_ext.cli import FAILURES, CommandParser, clean_exit, definitions
from verl_ext.commands import program
from verl_ext.console import print_line
from verl_ext.plan.options import OWN, known_words, read_words

EXIT_CODES = {"0": "every plan fits", "1": "one does not fit", **FAILURES}


def build_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog=program("plan"),
        description="Predict memory and speed of a recipe on so many GPUs; nothing is started.",
        examples=[
            f"{program('plan')} recipe=qwen2.5_coder_7b gpus=8 hardware=h100",
            f"{program('plan')} recipe=qwen2.5_coder_7b gpus=8,64,512 --markdown",
            f"{program('plan')} recipe=quickstart gpus=2 hardware=cpu mean_length=150 --largest",
        ],
        notes=f"the command's own words:\n{definitions(OWN)}\n\ndocs/plan.md explains the formulas.",
        exit_codes=EXIT_CODES,
        keys=known_words,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="key=value",
        help="recipe=NAME, overrides of its configuration, and the words below",
    )
    parser.add_argument("--largest", action="store_true", help="take the largest micro-batch or token budget that fits")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="print a table with a row for each number of GPUs")
    output.add_argument("--json", action="store_true", help="print a JSON list with every moment's memory in bytes")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Plan.

    Args:
        argv: arguments without the program's name; None takes the process's own.

    Returns:
        0 when all plans fit, else 1.

    Raises:
        SystemExit: with code 2 after bad input and 75 after a stop, each explained on standard error.
    """
    with clean_exit():
        arguments = build_parser().parse_intermixed_args(argv)
        options = read_words(arguments.words)
        from verl_ext.plan.planning import plans_for  # here, as torch takes seconds to import
        from verl_ext.plan.report import as_dict, as_markdown, as_text

        planned, notes = plans_for(options, arguments.largest)
        if arguments.json:
            print_line(json.dumps([as_dict(each.plan, each.advice, notes) for each in planned], indent=1))
        elif arguments.markdown:
            print_line(as_markdown([each.plan for each in planned]))
        else:
            print_line("\n\n".join(as_text(each.plan, each.advice, notes) for each in planned))
        return int(not all(each.plan.fits for each in planned))


if __name__ == "__main__":
    sys.exit(main())
