"""Common parts of all command lines: help with examples, one-sentence errors, and a clean exit on Ctrl-C."""

from __future__ import annotations

import argparse
import atexit
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from verl_ext.console import print_line
from verl_ext.errors import STOP_SIGNALS, STOPPED_EXIT_CODE, UserError, exit_on_user_error
from verl_ext.paths import caller_directory
from verl_ext.processes import StopRequest, StopSignals
from verl_ext.suggestions import RANKS, meant_command, meant_key, meant_option

FAILURES = {"2": "bad input; the message says how to fix it", "75": "stopped by a signal, such as Ctrl-C"}
EXIT_CODES = {"0": "done", **FAILURES}
"""Default exit codes of a command."""
_OPTION = re.compile(r"--?[^\W\d][^\s]*")
"""An option, but not a negative number or text with a space."""
WIDTH = 110
"""Maximum characters of a line of help."""
GRACE_S = 30.0
"""Time that a command may take to end after a stop signal; after that, another signal kills it."""
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class CommandParser(argparse.ArgumentParser):
    """A parser whose help has examples and exit codes, and whose errors are `UserError`s.

    Args:
        prog: the command as the user types it, up to its arguments.
        description: description of the command, in paragraphs.
        examples: complete commands, at least one.
        notes: further paragraphs after the examples; paragraphs with an indented line keep their line breaks.
        exit_codes: meaning of each exit code.
        keys: returns the keys that can be set as key=value, given the words typed; None if there are no such keys.
    """

    def __init__(
        self,
        *,
        prog: str,
        description: str,
        examples: Sequence[str],
        notes: str = "",
        exit_codes: Mapping[str, str] = EXIT_CODES,
        keys: Callable[[Sequence[str]], Collection[str]] | None = None,
        **settings: Any,
    ) -> None:
        self.keys = keys
        parts = ["\n".join(["examples:", *(f"  {example}" for example in examples)]), notes.strip()]
        parts.append(f"exit codes:\n{definitions(exit_codes)}")
        settings |= {"epilog": "\n\n".join(filter(None, parts)), "formatter_class": _HelpFormatter}
        super().__init__(prog=prog, description=description, allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        """Raise a `UserError` with the message and a reference to --help."""
        raise UserError(f"{message}{' See' if message.endswith('?') else '; see'} `{self.prog} --help`")

    def parse_known_args(  # type: ignore[override]  # argparse has overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Like argparse, but refuse an unknown option first, and suggest the option that was probably meant."""
        words = sys.argv[1:] if args is None else list(args)
        for place, word in enumerate(words):
            if word == "--" or word in self._commands():  # what follows is not an option, or belongs to another parser
                break
            if _OPTION.match(word) and word.partition("=")[0] not in self._option_string_actions:
                self._refuse_option(words, place)
        return super().parse_known_args(words, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print, ignoring write errors like argparse; `exit_on_user_error` reports them later."""
        print_line(message, file, end="")

    def _commands(self) -> Collection[str]:
        """The commands; empty if the parser has none."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return actions[0].choices if actions else ()

    def _refuse_option(self, words: Sequence[str], place: int) -> NoReturn:
        """Refuse an unknown option among the words typed, and suggest the one that was probably meant."""
        (name, equals, value), following = words[place].partition("="), words[place + 1 :]
        if not equals:
            value = following[0] if following and not _OPTION.match(following[0]) else "VALUE"
        is_path = os.path.exists(caller_directory() / words[place])
        meant = f"./{words[place]}" if is_path else meant_option(name, self._option_string_actions)
        if meant is None and self.keys is not None:
            key = meant_key(name, self.keys(words))
            ranks = value if value.isdecimal() else "2"
            meant = f"`{self.prog} {ranks}`" if key == RANKS else None if key is None else f"{key}={value}"
        if meant is not None:
            self.error(f"there is no option {name}; did you mean {meant}?")
        hint = "" if self.keys is None else "; settings are given as key=value"
        self.error(f"there is no option {name}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value with `choices` like argparse, but with suggestions for an unknown command."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        known, is_path, unknown = list(action.choices), "/" in value, f"there is no command '{value}'"
        if is_path and "--root" in self._option_string_actions:
            message = f"{unknown}; did you mean --root {value}?"
        elif is_path:
            message = f"specify a command before '{value}'; choose one of {', '.join(known)}"
        elif (meant := meant_command(value, known)) is not None:
            message = f"{unknown}; did you mean '{meant}'?"
        else:
            message = f"{unknown}; choose one of {', '.join(known)}"
        raise argparse.ArgumentError(None, message)


def child_process_args(module: str, text: str, started_by: str, *names: str) -> list[str]:
    """Parse the arguments of a process that another command starts; its `--help` says so.

    Raises:
        SystemExit: after --help, or with code 2 if arguments are missing.
    """
    description = f"{text} Other commands start this process; users do not need it."
    parser = CommandParser(prog=f"python -m {module}", description=description, examples=[started_by])
    for name in names:
        parser.add_argument(name, metavar=name.upper())
    with exit_on_user_error():
        return list(vars(parser.parse_args()).values())


def add_commands(parser: CommandParser, *, required: bool = True) -> Commands:
    """Create the object that `add_command` adds to; the argument `command` holds the command typed."""
    return parser.add_subparsers(
        dest="command",
        required=required,
        metavar="COMMAND",
        title="commands",
        description="run COMMAND --help for its options",
    )


def add_command(commands: Commands, name: str, text: str, **settings: Any) -> CommandParser:
    """Add a command with the settings of `CommandParser`; the first sentence of `text` is its summary in the list."""
    summary = text.partition(". ")[0].rstrip(".")
    return commands.add_parser(name, help=summary[0].lower() + summary[1:], description=text, **settings)


def definitions(rows: Mapping[str, str]) -> str:
    """Format words and their meanings in two columns."""
    indent = max(map(len, rows)) + 4
    return "\n".join(
        textwrap.fill(meaning, _width(), initial_indent=f"  {word}".ljust(indent), subsequent_indent=" " * indent)
        for word, meaning in rows.items()
    )


@contextmanager
def clean_exit(typed_again: str = "starts over") -> Iterator[None]:
    """Context of a command's `main`: bad input and stop requests exit without a traceback.

    The first stop signal raises `StopRequest`, once. Repeats count as the same request until the process exits, because
    schedulers signal twice. A second Ctrl-C kills the process as usual, and so does any signal after `GRACE_S`.
    `typed_again` says what the same command does next time, for the message.

    Raises:
        SystemExit: 2 after a `UserError`, 75 after a stop signal.
    """
    signals = StopSignals(STOP_SIGNALS, kill_after_s=GRACE_S)
    with exit_on_user_error():
        try:
            signals.install()
            with signals.raising():
                yield
        except StopRequest as stop:
            atexit.register(signals.ignore)
            print_line(f"Stopped by {stop.signal.name}; the same command {typed_again}.", sys.stderr)
            raise SystemExit(STOPPED_EXIT_CODE) from None
        finally:
            if not signals.received:
                signals.uninstall()


# Argument types, which report mistakes before any work begins


@dataclass(frozen=True)
class IntArg:
    """Type of an argument that is an integer of at least `minimum` and, if given, at most `maximum`."""

    minimum: int = 1
    maximum: int | None = None

    def __call__(self, text: str) -> int:
        """The number typed; argparse reports an `ArgumentTypeError`."""
        value = int(text) if text.isascii() and text.removeprefix("-").isdigit() else None
        if value is None or value < self.minimum or (self.maximum is not None and value > self.maximum):
            bounds = f"of {self.minimum} or more" if self.maximum is None else f"from {self.minimum} to {self.maximum}"
            raise argparse.ArgumentTypeError(f"'{text}' is not an integer {bounds}")
        return value


@dataclass(frozen=True)
class FloatArg:
    """Type of an argument that is a number between two bounds; `closed` includes the bounds."""

    above: float = 0.0
    below: float = math.inf
    closed: bool = False

    def __call__(self, text: str) -> float:
        """The number typed; argparse reports an `ArgumentTypeError`."""
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        on_bound = self.closed and value in (self.above, self.below)
        if not (on_bound or self.above < value < self.below):
            bounds = f"above {self.above:g}" if self.below == math.inf else f"between {self.above:g} and {self.below:g}"
            raise argparse.ArgumentTypeError(f"'{text}' is not a number {bounds}")
        return value


def output_file(text: str) -> Path:
    """Type of an argument that names an output file; refuses files that cannot be written."""
    path = Path(text).expanduser()
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"'{text}' is a directory; specify a file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be written; specify a file in an existing directory")
    return path


# Help


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps paragraphs except indented ones, and shows all defaults."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip().split("\n\n")
        return "\n\n".join(block if "\n " in f"\n{block}" else textwrap.fill(block, width) for block in blocks)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_empty = default is None or default is False or default == [] or default is argparse.SUPPRESS
        if not action.option_strings or is_empty or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else "%(default)s"
        return f"{text} (default: {shown})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.type is int or isinstance(action.type, IntArg):
            return "N"
        return "X" if isinstance(action.type, FloatArg) else action.dest.upper()


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDTH)


def is_number(word: str, least: int, most: int = 2**31 - 1) -> bool:
    """Whether a word consists of ASCII digits and is a number within limits."""
    return word.isascii() and word.isdecimal() and least <= int(word) <= most
