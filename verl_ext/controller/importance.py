"""`python -m verl_ext.controller.importance`: measures how much a model loses without each of its blocks."""

from __future__ import annotations

from verl_ext.cli import CommandParser, clean_exit
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary
from verl_ext.controller.calibrate import EXAMPLE_INPUTS, add_model_arguments, load_inputs

TEXT = """Measure how much a model loses when one of its blocks is skipped.

The importance of a block is the increase of the loss of the first reference answer, in nats per token, when that block
alone is skipped, averaged over questions. Block 0 always runs and has none."""


def build_parser() -> CommandParser:
    """The options."""
    parser = CommandParser(
        prog="python -m verl_ext.controller.importance",
        description=TEXT,
        examples=[f"python -m verl_ext.controller.importance {EXAMPLE_INPUTS} --output importance.json"],
    )
    add_model_arguments(parser)
    return parser


@clean_exit()
def main() -> None:
    """Measure, print the scores and write them."""
    arguments = build_parser().parse_args()
    from verl_ext.controller.block_importance import measure_importance  # here, as torch takes seconds to import

    importance = measure_importance(*load_inputs(arguments))
    for block, score in sorted(importance.scores.items(), key=lambda item: -item[1]):
        print_line(f"block {block:>3}  {score:+.4f}")
    importance.save(arguments.output)
    path = arguments.output.absolute()
    then = (*typed_command("grpo"), 2, "recipe=budget_controller", f"controller.importance_file={path}")
    print_summary(f"Measured: the blocks of {arguments.model}", {"importance": path}, then)


if __name__ == "__main__":
    main()
