"""The wheel, as a user builds it from a clone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.helpers import ROOT

PACKAGED = ("verl_ext", "eval_pipeline", "recipes", "requirements")
"""Folders from which the wheel is built."""


def build_wheel(directory: Path) -> Path:
    """Build the wheel without a network, from a copy of the files, since setuptools writes next to them.

    Args:
        directory: an empty directory for the copy and the wheel.
    """
    source = directory / "source"
    for name in PACKAGED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, f"--wheel-dir={directory}", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [wheel] = directory.glob("*.whl")
    return wheel
