"""Campaign: the GPU check in its documented environment, with the wheels collected as the page describes.

The environment is created with uv (7 GB, a few minutes); VERL_EXT_GPU_CHECK_PYTHON names an interpreter that has the
packages already.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.processes import uv

PACKAGES = ("torch==2.11.0", "transformers==5.17.0", "numpy==2.5.*", "pandas", "pyarrow", "peft", "scipy", "psutil")
MAX_MIB = 40


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python 3.12 with the packages of the GPU machine."""
    if named := os.environ.get("VERL_EXT_GPU_CHECK_PYTHON"):
        return named
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed, which creates the environment; or set VERL_EXT_GPU_CHECK_PYTHON")
    directory = tmp_path_factory.mktemp("gpu_check")
    uv("venv", "--seed", "--python", "3.12", directory / "venv")
    interpreter = str(directory / "venv/bin/python")
    uv("pip", "install", "--python", interpreter, "--compile-bytecode", *PACKAGES)
    return interpreter


def pip(python: str, *words: str | Path) -> None:
    done = subprocess.run([python, "-m", "pip", *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_runs_with_listed_wheels_only(python: str, tmp_path: Path) -> None:
    wheels, site, output = tmp_path / "wheels", tmp_path / "site", tmp_path / "gpu.json"
    pip(python, "wheel", "--no-deps", "-r", "requirements/gpu_check.txt", "-w", wheels)
    files = sorted(wheels.glob("*.whl"))
    assert sum(path.stat().st_size for path in files) < MAX_MIB * 2**20
    pip(python, "install", "--no-index", "--no-deps", "--no-compile", "--target", site, *files)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [python, "-m", "benchmarks.gpu_check", "--tiny", "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(output.read_text())
    assert report["versions"]["torch"].startswith("2.11.0") and report["versions"]["transformers"] == "5.17.0"
    skipped = {part["part"] for part in report["parts"] if [row["name"] for row in part["rows"]] == ["skipped"]}
    assert skipped == {"GRPO, vLLM", "controller"}
