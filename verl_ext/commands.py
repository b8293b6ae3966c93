"""The commands of the product, and how a user types them: `verl-ext sft`, `bash run_sft.sh` or `python -m ...`.

Standard library only, so that --help is fast.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass

from verl_ext.console import typed_path
from verl_ext.errors import UserError
from verl_ext.paths import CHECKOUT, PROGRAM_VARIABLE

CONSOLE_SCRIPT = "verl-ext"
SET_UP_SEPARATELY = {"verl": "verl", "vllm": "vLLM"}
"""Modules that `verl-ext setup` installs, because pip cannot resolve them with the other packages."""


@dataclass(frozen=True)
class Command:
    """A command of the console script.

    Attributes:
        summary: line in `verl-ext --help`.
        module: module that `python -m` runs.
        words: arguments before the user's arguments.
        script: shell script of the repository for the same command, if any.
    """

    summary: str
    module: str
    words: tuple[str, ...] = ()
    script: str | None = None


COMMANDS = {
    "setup": Command("Install verl and vLLM", "verl_ext.install"),
    "prepare": Command("Prepare training data or a small model", "verl_ext.data.prepare"),
    "sft": Command("Fine-tune a model on chats", "verl_ext.launch", ("sft",), "run_sft.sh"),
    "grpo": Command("Train a model with GRPO", "verl_ext.launch", ("grpo",), "run_grpo.sh"),
    "eval": Command("Evaluate checkpoints", "eval_pipeline", (), "eval_pipeline/run.sh"),
    "judge": Command("Judge existing answers", "eval_pipeline", ("judge",), "eval_pipeline/run.sh"),
    "monitor": Command("Show runs in a browser", "verl_ext.monitor"),
    "plan": Command("Estimate memory and step time", "verl_ext.plan"),
    "health": Command("Check the health of a run", "verl_ext.health"),
    "checkpoint": Command("List, verify, export, remove and compare checkpoints", "verl_ext.checkpoint"),
}


def program(name: str) -> str:
    """The command line of a command of `COMMANDS`, for help and messages."""
    command = COMMANDS[name]
    if _uses_console_script():
        return f"{os.environ.get(PROGRAM_VARIABLE, CONSOLE_SCRIPT)} {name}"
    start = f"python -m {command.module}" if command.script is None else f"bash {command.script}"
    return " ".join([start, *_words_to_type(command)])


def typed_command(name: str) -> list[str]:
    """The words that start a command of `COMMANDS` from the user's current directory."""
    command = COMMANDS[name]
    if _uses_console_script():
        return [*shlex.split(os.environ.get(PROGRAM_VARIABLE, CONSOLE_SCRIPT)), name]
    if command.script is None or CHECKOUT is None:
        return [typed_path(sys.executable), "-m", command.module, *command.words]
    return ["bash", typed_path(CHECKOUT / command.script), *_words_to_type(command)]


def require_package(module: str) -> None:
    """Refuse to start without a package of `SET_UP_SEPARATELY`, without importing it.

    Raises:
        UserError: the package is missing; the message names the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise UserError(missing_package(module))


def require_optional_package(package: str, setting: str, instead: str) -> None:
    """Refuse a setting whose package is not installed, and name an alternative."""
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        raise UserError(f"{setting} needs the package {package} (and a GPU); install it, or set {instead}")


def missing_package(module: str) -> str:
    """The message about a missing package of `SET_UP_SEPARATELY`."""
    return f"{SET_UP_SEPARATELY[module]} is not installed for {sys.executable}; run `{program('setup')}`"


def _uses_console_script() -> bool:
    return PROGRAM_VARIABLE in os.environ or CHECKOUT is None


def _words_to_type(command: Command) -> tuple[str, ...]:
    """The command's words without the stage that run_sft.sh and run_grpo.sh add themselves."""
    return () if command.module == "verl_ext.launch" else command.words
