"""Where the package, its data files and the user are, in a checkout of the repository and installed from a wheel.

Standard library only, so that --help is instant.
"""

from __future__ import annotations

import os
import site
from pathlib import Path

PROGRAM_VARIABLE = "VERL_EXT_PROGRAM"
"""Environment variable of a command that was started by the console script: how the user typed that script."""
CALLER_VARIABLE = "VERL_EXT_CALLED_FROM"
"""Environment variable that the shell scripts set, because they change to the repository."""
_PACKAGE = Path(__file__).resolve().parent
PACKAGES = _PACKAGE.parent
"""The directory that contains `verl_ext` and `eval_pipeline`."""
CHECKOUT = None if (_PACKAGE / "recipes").is_dir() else PACKAGES
"""The repository; None in an installed wheel, which has `recipes/` and `requirements/` inside `verl_ext`."""
RECIPES = (CHECKOUT or _PACKAGE) / "recipes"
REQUIREMENTS = (CHECKOUT or _PACKAGE) / "requirements"
_SITE = {Path(each).resolve() for each in (*site.getsitepackages(), site.getusersitepackages())}
IMPORT_PATH = "" if PACKAGES in _SITE else str(PACKAGES)
"""What a child process needs on PYTHONPATH to import the package; empty if its interpreter finds it anyway."""


def python_path() -> str:
    """PYTHONPATH of a child process that imports the package."""
    return os.pathsep.join(filter(None, [IMPORT_PATH, os.environ.get("PYTHONPATH")]))


def caller_directory() -> Path:
    """The directory in which the command was typed."""
    return Path(os.environ.get(CALLER_VARIABLE, "."))


def base_directory() -> Path:
    """The directory that `data/` and `checkpoints/` of recipes are relative to.

    The shell scripts and `python -m` work in the repository. The console script works where the user is.
    """
    return Path.cwd() if CHECKOUT is None or PROGRAM_VARIABLE in os.environ else CHECKOUT
