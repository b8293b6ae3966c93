"""`python -m verl_ext.controller.importance`: measures how much a model loses without each of its blocks."""

from __future__ import annotations

from verl_ext.cli import CommandParser, clean_exit
from verl_ext.commands import typed_command
from verl_ext.console import print_line, print_summary
from verl_ext.controller.command import EXAMPLE_INPUTS, add_model_arguments

TEXT = """Measure how much a model loses when one of its blocks is left out.

The importance of a block is the increase of the loss of the first reference answer, in nats per token, when that block
alone is skipped; the mean over some questions. Block 0 always runs and has none."""


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
    from verl_ext.controller.measured import adapter_from, questions_from

    found = measure_importance(adapter_from(arguments), questions_from(arguments))
    for block, score in sorted(found.scores.items(), key=lambda item: -item[1]):
        print_line(f"block {block:>3}  {score:+.4f}")
    found.save(arguments.output)
    path = arguments.output.absolute()
    then = (*typed_command("grpo"), 2, "recipe=budget_controller", f"controller.importance_file={path}")
    print_summary(f"Measured: the blocks of {arguments.model}", {"importance": path}, then)


if __name__ == "__main__":
    main()
