"""`python -m verl_ext.reference`: prints `docs/recipes.md` from the defaults and the checks."""

from __future__ import annotations

from verl_ext.cli import CommandParser, clean_exit
from verl_ext.console import print_line


@clean_exit()
def main() -> None:
    """Run the command."""
    parser = CommandParser(
        prog="python -m verl_ext.reference",
        description="Print the reference page of all recipe keys as Markdown.",
        examples=["python -m verl_ext.reference > docs/recipes.md"],
    )
    parser.parse_args()
    from verl_ext.reference.page import render_recipes  # here, as it takes a second

    print_line(render_recipes().removesuffix("\n"))


if __name__ == "__main__":
    main()
