"""What the commands' arguments have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from verl_ext.cli import CommandParser, Commands, add_command
from verl_ext.commands import program

Action = Callable[[argparse.Namespace], int]

PROGRAM = program("eval")
RECIPE_EXAMPLE = """\
recipes/eval/NAME.yaml sets the data sets, the sampling, the engine and the limits. key=value overrides one of its keys,
such as sampling.max_tokens=512 or datasets.quickstart.limit=20."""


def add_action(
    commands: Commands, name: str, text: str, action: Action, *, examples: Sequence[str], **settings: Any
) -> CommandParser:
    """Add a command.

    Args:
        commands: where to add it.
        name: the word that is typed.
        text: what it does, see `add_command`.
        action: receives its arguments and returns the exit code.
        examples: what is typed behind the program.
        settings: others of the parser.
    """
    start = settings.setdefault("prog", f"{PROGRAM} {name}")
    typed = [f"{start} {example}" for example in examples]
    parser = add_command(commands, name, text, examples=typed, **settings)
    parser.set_defaults(action=action, typed_again="resumes")
    return parser


def add_recipe(parser: CommandParser) -> None:
    """Add the arguments that choose and change the recipe."""
    parser.add_argument("--recipe", metavar="NAME", help="evaluation recipe (default: the run's, or quickstart)")
    parser.add_argument("--no-wandb", action="store_true", help="do not log to W&B")
    add_overrides(parser)


def add_overrides(parser: CommandParser) -> None:
    """Add `key=value`."""
    parser.keys = keys_of_recipe
    # a default, or argparse names them among what is required
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help="override a key of the recipe")


def keys_of_recipe(words: Sequence[str]) -> list[str]:
    """The keys of a recipe, for suggestions alone, as importing what knows them takes a second."""
    from eval_pipeline.recipe.load import known_keys

    return known_keys()


def add_directory(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the directory that a command is about; text until it is told from overrides (`__main__.parse`)."""
    parser.add_argument("directory", metavar="RUN_DIR", help=what)
