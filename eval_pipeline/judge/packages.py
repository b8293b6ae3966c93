"""Installed packages that answers and tests may import beside the standard library."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import machinery

from verl_ext.errors import UserError


@dataclass(frozen=True)
class Package:
    """One installed package."""

    name: str
    version: str
    modules: dict[str, str]
    """What can be imported, and the file that is run then."""
    paths: tuple[str, ...]
    """Files and folders that sandboxes need of it."""


def find_packages(names: Iterable[str], key: str = "judge.packages") -> tuple[Package, ...]:
    """Look packages up without importing them.

    Args:
        names: as pip knows them.
        key: the setting that names them, for messages.

    Raises:
        UserError: one is not installed, or holds nothing to import.
    """
    return tuple(_find(name, key) for name in names)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """The version of each package.

    Raises:
        UserError: as `find_packages`.
    """
    return {package.name: package.version for package in find_packages(names)}


@functools.cache
def _find(name: str, key: str) -> Package:
    from importlib import metadata  # slow, and a configuration that imports this package rarely needs it

    try:
        installed = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise UserError(f"{key} names {name!r}, which is not installed; install or remove it") from error
    files = {str(file) for file in installed.files or ()}
    tops = sorted({file.split("/")[0] for file in files} - {"..", "__pycache__"})
    tops = [top for top in tops if not top.endswith((".dist-info", ".egg-info", ".pth"))]
    modules = {module: str(installed.locate_file(file)) for top in tops for module, file in _module(top, files)}
    if not modules:
        raise UserError(f"{key} names {name!r}, whose files cannot be found; install it as a wheel")
    return Package(name, installed.version, modules, tuple(str(installed.locate_file(top)) for top in tops))


def _module(top: str, files: set[str]) -> Iterable[tuple[str, str]]:
    if f"{top}/__init__.py" in files:
        yield top, f"{top}/__init__.py"
    elif top in files and top.endswith(tuple(machinery.all_suffixes())):
        yield top.split(".")[0], top
