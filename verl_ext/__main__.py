"""The console script `verl-ext COMMAND ...`, also `python -m verl_ext COMMAND ...`: starts the command's module."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import NoReturn

from verl_ext.cli import FAILURES, CommandParser, add_commands
from verl_ext.commands import COMMANDS, CONSOLE_SCRIPT
from verl_ext.errors import exit_on_user_error
from verl_ext.paths import CALLER_VARIABLE, PROGRAM_VARIABLE, python_path


def build_parser(program: str) -> CommandParser:
    """The parser with the list of commands; each command parses its own arguments."""
    parser = CommandParser(
        prog=program,
        description="Post-training on verl 0.7.0 for preemptible machines: SFT, GRPO and evaluation. Run directories "
        "and prepared data are created in the current directory.",
        examples=[
            f"{program} setup",
            f"{program} sft 2",
            f"{program} eval watch checkpoints/rlvr_coding_model/sft_quickstart",
            f"{program} grpo 2",
        ],
        exit_codes={"0": "done", **FAILURES, "others": "see the command's --help"},
    )
    commands = add_commands(parser)
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, description=command.summary, examples=[f"{program} {name}"])
    return parser


def main() -> NoReturn:
    """Replace this process with the command; without a known command, print help or refuse the arguments.

    Raises:
        SystemExit: 0 after --help, 2 for an unknown command.
    """
    words, program = sys.argv[1:], typed_program()
    with exit_on_user_error():
        if not words or words[0] not in COMMANDS:
            build_parser(program).parse_args(words)
    start(words[0], words[1:], program)


def typed_program() -> str:
    """How the user typed this script: its name if it is on PATH, otherwise its path."""
    typed = sys.argv[0]
    if typed.endswith("__main__.py"):
        return "python -m verl_ext"
    found = shutil.which(CONSOLE_SCRIPT)
    return CONSOLE_SCRIPT if found is not None and os.path.samefile(found, typed) else shlex.quote(typed)


def start(name: str, words: list[str], program: str) -> NoReturn:
    """Become the process that `python -m` would start for the command.

    PYTHONSAFEPATH keeps the command and its children from importing modules from the current directory, which may hold
    a checkout of another version, or a file with the name of a library.
    """
    command = COMMANDS[name]
    environment = {
        **os.environ,
        PROGRAM_VARIABLE: program,
        CALLER_VARIABLE: os.getcwd(),
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": python_path(),
    }
    os.execve(sys.executable, [sys.executable, "-m", command.module, *command.words, *words], environment)


if __name__ == "__main__":
    main()
