"""What the commands' arguments have in common."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Action = Callable[[argparse.Namespace], int]

RECIPE_EXAMPLE = """recipes/eval/NAME.yaml names the data sets, the sampling, the engine and the limits; key=value
overrides a key of it, such as sampling.max_tokens=512 or datasets.quickstart.limit=20."""


def add_command(commands: Commands, name: str, text: str, action: Action, epilog: str = "") -> argparse.ArgumentParser:
    """Add a command; `action` receives its arguments and returns the exit code."""
    parser = commands.add_parser(
        name,
        help=text[0].lower() + text.partition(".")[0][1:],
        description=textwrap.fill(text, 100),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(action=action, typed_again="goes on")
    return parser


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose and change the recipe."""
    parser.add_argument("--recipe", metavar="NAME", help="recipe to evaluate by (default: the run's, else quickstart)")
    parser.add_argument("--no-wandb", action="store_true", help="send nothing to W&B")
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `key=value`."""
    # a default, or argparse names them among what is required
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="keys of the recipe to change")


def add_directory(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the directory that a command is about; text until it is told from overrides (`__main__.parse`)."""
    parser.add_argument("directory", metavar="RUN_DIR", help=what)


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def not_negative(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


# argparse names the type function in its message for text that is no number
positive.__name__ = not_negative.__name__ = "whole number"
