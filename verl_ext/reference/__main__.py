"""`python -m verl_ext.reference`: prints `docs/recipes.md` from the defaults and the checks."""

from __future__ import annotations

import argparse

from verl_ext.errors import exit_on_user_error
from verl_ext.reference.page import render_recipes


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m verl_ext.reference",
        description="Print the reference page of all recipe keys as Markdown.",
        epilog="example: python -m verl_ext.reference > docs/recipes.md",
    )
    parser.parse_args()
    print(render_recipes(), end="")


if __name__ == "__main__":
    with exit_on_user_error():
        main()
