"""User code that a recipe or a command names as `path.py:NAME` or `package.module:NAME`.

It is loaded only if a recipe or command names it, never because a run or an export contains it. A file is loaded on its
own: its imports must be installed or on PYTHONPATH. Reward functions can also import files of their directory.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from verl_ext.errors import UserError, one_line
from verl_ext.paths import base_directory, caller_directory

PLUGIN_FORM = "path.py:NAME or package.module:NAME"
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Plugin:
    """A user-defined function, class or list in an existing file or module.

    Attributes:
        key: the setting or option that names the plugin, for messages.
        location: absolute path of the file, or dotted name of the module.
        name: name of the function, class or list.
    """

    key: str
    location: str
    name: str

    @classmethod
    def parse(cls, text: str, key: str) -> Plugin:
        """Parse `LOCATION:NAME`; runs no code except the packages that contain a module.

        A relative path is resolved in the directory where the command was typed, then in the repository.

        Raises:
            UserError: the text has another form, or the file or module does not exist.
        """
        location, _, name = text.rpartition(":")
        if not location or not name.isidentifier():
            raise UserError(f"{key} is {text!r}; write {PLUGIN_FORM}")
        if location.endswith(".py"):
            location = str(find_file(location, key))
        elif not is_module(location):
            path = f"{location.replace('.', '/') if _DOTTED.fullmatch(location) else location}.py"
            raise UserError(
                f"{key} names the module {location!r}, which is not found; install it, put its directory on "
                f"PYTHONPATH, or write {path}:{name}"
            )
        return cls(key, location, name)

    def __str__(self) -> str:
        return f"{self.location}:{self.name}"

    @property
    def is_file(self) -> bool:
        """Whether the location is a file, not a module."""
        return self.location.endswith(".py")

    def load(self) -> Any:
        """Import the file or module and return the named object.

        Raises:
            UserError: the code fails, or does not define the name.
        """
        try:
            module = load_file(Path(self.location)) if self.is_file else importlib.import_module(self.location)
        except Exception as error:  # user code can raise anything
            raise UserError(
                f"{self.key} names {self.location}, which cannot be loaded ({one_line(error)}); fix it"
            ) from error
        if not hasattr(module, self.name):
            near = sorted(name for name, value in vars(module).items() if not name.startswith("_") and callable(value))
            raise UserError(f"{self.key}: {self.location} has no {self.name!r}; it has {', '.join(near) or 'nothing'}")
        return getattr(module, self.name)


def find_file(text: str, key: str) -> Path:
    """The absolute path of a file that `Plugin.parse` names.

    Raises:
        UserError: there is no such file.
    """
    path = Path(text).expanduser()
    for folder in (caller_directory(), Path("."), base_directory()):
        if (folder / path).is_file():
            return (folder / path).absolute()
    raise UserError(f"{key} names the file {path.absolute()}, which does not exist; correct the path")


def is_module(name: str) -> bool:
    """Whether a module with this dotted name exists; imports only the packages that contain it."""
    try:
        return _DOTTED.fullmatch(name) is not None and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a package above it is missing or broken
        return False


def load_file(path: Path) -> ModuleType:
    """Run a Python file as a module."""
    name = f"plugin_{xxhash.xxh3_64_hexdigest(str(path).encode())}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the file exists and ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module
