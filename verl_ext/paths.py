"""Paths of the package, its data files and the user, in a checkout of the repository and in an installed wheel.

Standard library only, so that --help is fast.
"""

from __future__ import annotations

import os
import site
from pathlib import Path

PROGRAM_VARIABLE = "VERL_EXT_PROGRAM"
"""Environment variable that the console script sets for its commands: how the user typed the script."""
CALLER_VARIABLE = "VERL_EXT_CALLED_FROM"
"""Environment variable with the caller's directory, set because the shell scripts change to the repository."""
_PACKAGE = Path(__file__).resolve().parent
PACKAGES = _PACKAGE.parent
"""The directory that contains `verl_ext` and `eval_pipeline`."""
CHECKOUT = None if (_PACKAGE / "recipes").is_dir() else PACKAGES
"""The repository; None in an installed wheel, which has `recipes/` and `requirements/` inside `verl_ext`."""
RECIPES = (CHECKOUT or _PACKAGE) / "recipes"
REQUIREMENTS = (CHECKOUT or _PACKAGE) / "requirements"
_SITE = {Path(each).resolve() for each in (*site.getsitepackages(), site.getusersitepackages())}
IMPORT_PATH = "" if PACKAGES in _SITE else str(PACKAGES)
"""Entry of PYTHONPATH that a child process needs to import the package; empty if the package is installed."""


def python_path() -> str:
    """PYTHONPATH of a child process that imports the package."""
    return os.pathsep.join(filter(None, [IMPORT_PATH, os.environ.get("PYTHONPATH")]))


def caller_directory() -> Path:
    """The directory in which the command was typed."""
    return Path(os.environ.get(CALLER_VARIABLE, "."))


def base_directory() -> Path:
    """The directory that contains the recipes' `data/` and `checkpoints/`.

    The shell scripts and `python -m` use the repository. The console script uses the current directory.
    """
    return Path.cwd() if CHECKOUT is None or PROGRAM_VARIABLE in os.environ else CHECKOUT
