"""`python -m verl_ext.plan recipe=NAME gpus=8 [key=value ...]`: does it fit, how long does a step take, and why."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from verl_ext.errors import exit_on_user_error
from verl_ext.plan.options import OWN, read_words
from verl_ext.tell import tell


def build_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.plan",
        description="Predict memory and speed of a recipe on so many GPUs; nothing is started.",
        epilog="The command's own words:\n"
        + "\n".join(f"  {name:14}{meaning}" for name, meaning in OWN.items())
        + "\n\nExit codes: 0 all plans fit, 1 one does not, 2 bad input. docs/plan.md explains the formulas.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
        SystemExit: with code 2 after bad input, which is explained on standard error.
    """
    arguments = build_parser().parse_intermixed_args(argv)
    with exit_on_user_error():
        # here, as they take seconds: --help answers at once
        from verl_ext.plan.planning import plans_for
        from verl_ext.plan.report import as_dict, as_markdown, as_text

        planned, notes = plans_for(read_words(arguments.words), arguments.largest)
        if arguments.json:
            tell(json.dumps([as_dict(each.plan, each.advice, notes) for each in planned], indent=1))
        elif arguments.markdown:
            tell(as_markdown([each.plan for each in planned]))
        else:
            tell("\n\n".join(as_text(each.plan, each.advice, notes) for each in planned))
        return int(not all(each.plan.fits for each in planned))


if __name__ == "__main__":
    sys.exit(main())
