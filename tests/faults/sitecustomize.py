"""Holds one rank at a call of the product until the test lets it continue, or drops calls; see `Hold` in
tests/helpers/commands.py.

Every Python process whose PYTHONPATH begins with this folder loads this file at its start. It does nothing unless HOLD
describes a call and the process is the rank to hold. Then the function is wrapped as soon as its module has been
imported, so the product needs no hook for tests. A warm start runs this file in the fork, where the module is loaded
already. Standard library only, because every process loads it.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import os
import sys
import time
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any


class HoldingFinder(MetaPathFinder):
    """Finds the function's module as usual and wraps the function after the module has been executed."""

    def __init__(self, hold: dict[str, Any]) -> None:
        self.hold = hold

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find the function's module once, and no other module."""
        if name != self.hold["module"]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            wrap(module, self.hold)

        spec.loader.exec_module = execute_and_wrap
        return spec


def wrap(module: ModuleType, hold: dict[str, Any]) -> None:
    """Replace the function by one that waits before or after a matching call, or drops it and all later calls."""
    *owners, name = hold["function"].split(".")
    owner = functools.reduce(getattr, owners, module)
    function = getattr(owner, name)
    numbers = itertools.count(1)

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        number = next(numbers) if hold["match"] in "\n".join(words_of(args)) else 0
        if hold["when"] == "never" and number >= hold["call"]:
            return None
        is_now = number == hold["call"]
        if is_now and hold["when"] == "before":
            wait_for_the_test(Path(hold["directory"]))
        result = function(*args, **kwargs)
        if is_now and hold["when"] == "after":
            wait_for_the_test(Path(hold["directory"]))
        return result

    setattr(owner, name, held)


def words_of(arguments: tuple[Any, ...]) -> list[str]:
    """The numbers, strings and paths among the arguments and among the attributes of arguments."""
    held = [value for argument in arguments if hasattr(argument, "__dict__") for value in vars(argument).values()]
    plain = [str(value) for value in (*arguments, *held) if isinstance(value, str | int | PurePath)]
    return plain + [str(value.name) for value in held if hasattr(value, "fileno")]


def wait_for_the_test(directory: Path) -> None:
    """Report that the call has been reached, and continue once the test allows it."""
    (directory / "reached").touch()
    while not (directory / "go").exists():
        time.sleep(0.01)


if "HOLD" in os.environ:
    description = json.loads(os.environ["HOLD"])
    if os.environ.get("RANK") == str(description["rank"]):
        if description["module"] in sys.modules:  # a warm start
            wrap(sys.modules[description["module"]], description)
        else:
            sys.meta_path.insert(0, HoldingFinder(description))
