"""Lets answers and tests import a few installed packages, and nothing else of the folder where they are installed."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class PackageFinder:
    """Finds listed modules by their files; nothing is imported before somebody asks for it."""

    def __init__(self, files: dict[str, str]) -> None:
        """`files` has the file of each module."""
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Called by the import system when the standard library has no module of this name."""
        return importlib.util.spec_from_file_location(name, self._files[name]) if name in self._files else None


def allow(files: dict[str, str]) -> None:
    """Let these modules be imported from now on, here and in what is forked."""
    for name in _ONE_THREAD:
        os.putenv(name, "1")  # libraries read it as they are loaded; `os.environ` stays empty
    sys.meta_path.append(PackageFinder(files))
