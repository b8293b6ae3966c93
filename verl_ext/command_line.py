"""One manner for every command: help with examples, mistakes in one sentence, an orderly end at Ctrl-C."""

from __future__ import annotations

import argparse
import atexit
import re
import shutil
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, TypeAlias

from verl_ext.argument_types import Number, WholeNumber
from verl_ext.console import print_line
from verl_ext.errors import SAME_REQUEST_S, STOP_SIGNALS, STOPPED_EXIT_CODE, UserError, exit_on_user_error
from verl_ext.suggestions import RANKS, meant_command, meant_key, meant_option

FAILURES = {"2": "bad input; the message says how to fix it", "75": "stopped by a signal, such as Ctrl-C"}
EXIT_CODES = {"0": "done", **FAILURES}
"""Of a command that has no others to tell of."""
_OPTION = re.compile(r"--?[^\W\d][^\s]*")
"""What looks like an option; no negative number, and no text with a space."""
WIDTH = 110
"""Most characters of a line of help."""
GRACE_S = 30.0
"""How long a command may take to end after a stop signal; after that, another one kills it."""
Commands: TypeAlias = "argparse._SubParsersAction[CommandParser]"


class StopRequested(BaseException):
    """The command was asked to stop; no `Exception`, so that nothing on the way takes it for a failure."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


class CommandParser(argparse.ArgumentParser):
    """A parser whose help has examples and exit codes, and whose errors are told as all others are.

    Args:
        prog: the command as it is typed, up to its arguments.
        description: what it does, in paragraphs.
        examples: whole commands, at least one.
        notes: further paragraphs behind the examples; one with an indented line is left as it is.
        exit_codes: what each means, where there are more than `EXIT_CODES`.
        keys: gives the keys that can be set as key=value, from the words that were typed; None where there are none.
        settings: others of argparse.
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
        """Tell what is wrong with the words that were typed.

        Raises:
            UserError: always.
        """
        raise UserError(f"{message}{' See' if message.endswith('?') else '; see'} `{self.prog} --help`")

    def parse_known_args(  # type: ignore[override]  # argparse has overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """As argparse does, but an option that there is not is refused first, with what was probably meant."""
        words = sys.argv[1:] if args is None else list(args)
        for place, word in enumerate(words):
            if word == "--" or word in self._commands():  # what follows is no option, or another parser's
                break
            if _OPTION.match(word) and word.partition("=")[0] not in self._option_string_actions:
                self._refuse_option(word, words[place + 1 :], words)
        return super().parse_known_args(words, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print as argparse does, which ignores write errors; `exit_on_user_error` reports them later."""
        print_line(message, file, end="")

    def _commands(self) -> Collection[str]:
        """The commands that there are; none where the parser takes its arguments itself."""
        actions = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return actions[0].choices if actions else ()

    def _refuse_option(self, word: str, following: Sequence[str], words: Sequence[str]) -> NoReturn:
        """Tell that there is no such option, and what was probably meant.

        Args:
            word: the option, with or without `=VALUE`.
            following: the words behind it, of which the first may be its value.
            words: all that were typed.

        Raises:
            UserError: always.
        """
        name, equals, value = word.partition("=")
        if not equals:
            value = following[0] if following and not _OPTION.match(following[0]) else "VALUE"
        meant = meant_option(name, self._option_string_actions)
        if meant is None and self.keys is not None:
            key = meant_key(name, self.keys(words))
            ranks = value if value.isdecimal() else "2"
            meant = f"`{self.prog} {ranks}`" if key == RANKS else None if key is None else f"{key}={value}"
        if meant is not None:
            self.error(f"there is no option {name}; did you mean {meant}?")
        hint = "" if self.keys is None else "; settings are given as key=value"
        self.error(f"there is no option {name}{hint}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As argparse does, which calls it for a value that has `choices`; a command is refused in words of our own."""
        if not isinstance(action, argparse._SubParsersAction) or value in action.choices:
            super()._check_value(action, value)
            return
        known = list(action.choices)
        meant = meant_command(value, known)
        is_path = "/" in value
        if meant is not None and not is_path:
            raise argparse.ArgumentError(None, f"there is no command '{value}'; did you mean '{meant}'?")
        if is_path and "--root" in self._option_string_actions:
            raise argparse.ArgumentError(None, f"there is no command '{value}'; did you mean --root {value}?")
        what = f"name a command before '{value}'" if is_path else f"there is no command '{value}'"
        raise argparse.ArgumentError(None, f"{what}; take one of {', '.join(known)}")


def process_words(module: str, text: str, started_by: str, *names: str) -> list[str]:
    """What a process was given that another command starts; somebody who types it is told so by --help.

    Args:
        module: its own.
        text: what it does.
        started_by: a command that somebody types.
        names: of its words.

    Raises:
        SystemExit: after --help, and with code 2 where words are missing.
    """
    description = f"{text} Other commands start this process; it is not to be typed."
    parser = CommandParser(prog=f"python -m {module}", description=description, examples=[started_by])
    for name in names:
        parser.add_argument(name, metavar=name.upper())
    with exit_on_user_error():
        return list(vars(parser.parse_args()).values())


def add_commands(parser: CommandParser, *, required: bool = True) -> Commands:
    """What `add_command` adds to; the command that was typed is the argument `command`."""
    return parser.add_subparsers(
        dest="command",
        required=required,
        metavar="COMMAND",
        title="commands",
        description="run COMMAND --help for its options",
    )


def add_command(commands: Commands, name: str, text: str, **settings: Any) -> CommandParser:
    """Add a command.

    Args:
        commands: from `add_commands`.
        name: the word that is typed.
        text: what it does; the first sentence is its line in the list of commands.
        settings: those of `CommandParser`, at least `examples`.
    """
    summary = text.partition(". ")[0].rstrip(".")
    return commands.add_parser(name, help=summary[0].lower() + summary[1:], description=text, **settings)


def definitions(rows: Mapping[str, str]) -> str:
    """Words and their meanings, two columns."""
    indent = max(map(len, rows)) + 4
    return "\n".join(
        textwrap.fill(meaning, _width(), initial_indent=f"  {word}".ljust(indent), subsequent_indent=" " * indent)
        for word, meaning in rows.items()
    )


@contextmanager
def clean_exit(typed_again: str = "starts over") -> Iterator[None]:
    """What a command's `main` runs inside: neither bad input nor a request to stop leaves a traceback.

    Args:
        typed_again: what the same command does after a stop.

    Raises:
        SystemExit: 2 after a `UserError`, 75 after a stop signal.
    """
    with exit_on_user_error():
        try:
            with stop_on_signals():
                yield
        except StopRequested as stop:
            print_line(f"Stopped by {stop}; the same command {typed_again}.", sys.stderr)
            raise SystemExit(STOPPED_EXIT_CODE) from None


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Within the block, the first stop signal raises `StopRequested`, once.

    Repeats are the same request, as in `verl_ext.launch.stop`, until the process exits: schedulers signal twice. A
    second Ctrl-C kills as usual, and so does any signal after `GRACE_S`.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if number == signal.SIGINT:
            interrupts.append(now)
        if not asked:
            asked.append((number, now))
            atexit.register(_ignore, listened)
            raise StopRequested(number)
        is_second_interrupt = number == signal.SIGINT and now - interrupts[0] > SAME_REQUEST_S
        if is_second_interrupt or now - asked[0][1] > GRACE_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    # what whoever started us ignores, as nohup does, stays ignored
    listened = [name for name in STOP_SIGNALS if signal.getsignal(name) is not signal.SIG_IGN]
    asked: list[tuple[int, float]] = []
    interrupts: list[float] = []
    before = {name: signal.signal(name, stop) for name in listened}
    try:
        yield
    except Exception as error:
        if asked:  # what an import or a library makes of a request in its middle
            raise StopRequested(asked[0][0]) from error
        raise
    finally:
        if not asked:
            for name, handler in before.items():
                signal.signal(name, handler)


def _ignore(numbers: Collection[signal.Signals]) -> None:
    """Ignore signals while Python exits: it restores the default actions, so a repeat would kill the process."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


class _HelpFormatter(argparse.HelpFormatter):
    """Fills paragraphs, leaves indented ones alone, and tells every default."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip().split("\n\n")
        return "\n\n".join(block if "\n " in f"\n{block}" else textwrap.fill(block, width) for block in blocks)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if not action.option_strings or _is_empty(default) or "default" in text:
            return text
        shown = " ".join(map(str, default)) if isinstance(default, (list, tuple)) else "%(default)s"
        return f"{text} (default: {shown})"

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        if action.type is int or isinstance(action.type, WholeNumber):
            return "N"
        return "X" if isinstance(action.type, Number) else action.dest.upper()


def _is_empty(default: object) -> bool:
    return default is None or default is False or default == [] or default is argparse.SUPPRESS


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDTH)
