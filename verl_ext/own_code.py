"""Code of the user's own, as a recipe or a command names it: `path.py:NAME` or `package.module:NAME`.

It is loaded when something names it, and never because of what lies in a run or an export. A file is loaded by itself:
what it imports must be installed, or be found by PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from verl_ext.errors import UserError, one_line

FORM = "path.py:NAME or package.module:NAME"
_ROOT = Path(__file__).resolve().parents[1]
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class OwnCode:
    """One function, class or list, which is there to be loaded.

    Attributes:
        key: where it was named, for messages.
        place: absolute path of its file, or the dotted name of its module.
        name: that it has there.
    """

    key: str
    place: str
    name: str

    @classmethod
    def named(cls, text: str, key: str) -> OwnCode:
        """Read `PLACE:NAME`; nothing of it is run but the packages that hold a module.

        Args:
            text: what the user wrote. A relative path counts from where the command was typed, or from the repository.
            key: the setting or option that it was written for.

        Raises:
            UserError: it has another form, or there is no such file or module.
        """
        place, _, name = text.rpartition(":")
        if not place or not name.isidentifier():
            raise UserError(f"{key} is {text!r}; write {FORM}")
        return cls(key, str(find_file(place, key)) if place.endswith(".py") else find_module(place, key), name)

    @property
    def is_file(self) -> bool:
        """Whether the place is a file, and no module."""
        return self.place.endswith(".py")

    def load(self) -> Any:
        """What has the name.

        Raises:
            UserError: its file cannot be run, or has nothing of this name.
        """
        try:
            module = load_file(Path(self.place)) if self.is_file else importlib.import_module(self.place)
        except Exception as error:  # whatever the user's code raises
            raise UserError(
                f"{self.key} names {self.place}, which cannot be loaded ({one_line(error)}); mend it"
            ) from error
        if not hasattr(module, self.name):
            near = sorted(name for name, value in vars(module).items() if not name.startswith("_") and callable(value))
            raise UserError(f"{self.key}: {self.place} has no {self.name!r}; it has {', '.join(near) or 'nothing'}")
        return getattr(module, self.name)


def find_file(text: str, key: str) -> Path:
    """The absolute path of a file; the arguments are those of `OwnCode.named`.

    Raises:
        UserError: there is none.
    """
    path = Path(text).expanduser()
    for folder in (Path(os.environ.get("VERL_EXT_CALLED_FROM", ".")), Path("."), _ROOT):
        if (folder / path).is_file():
            return (folder / path).absolute()
    raise UserError(f"{key} names the file {path.absolute()}, which does not exist; correct the path")


def find_module(name: str, key: str) -> str:
    """The dotted name of a module that is there; the arguments are those of `OwnCode.named`.

    Raises:
        UserError: there is none.
    """
    if not is_module(name):
        raise UserError(f"{key} names the module {name!r}, which is not found; write {FORM}")
    return name


def is_module(name: str) -> bool:
    """Whether a dotted name is that of a module that can be found; only the packages that hold it are imported."""
    try:
        return _DOTTED.fullmatch(name) is not None and importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a package above it is missing or broken
        return False


def load_file(path: Path) -> ModuleType:
    """Run a Python file as a module of its own."""
    name = f"own_code_{xxhash.xxh3_64_hexdigest(str(path).encode())}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # the file is there and ends with .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module
