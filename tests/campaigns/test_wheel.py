"""Campaign: the wheel in a separate environment, from `pip install` to GRPO, in an initially empty directory.

The environment is created with uv (9 GB, a few minutes); VERL_EXT_WHEEL_PYTHON names an interpreter that has the wheel
already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.processes import uv
from tests.helpers.wheel import build_wheel

RUN = "checkpoints/rlvr_coding_model/sft_quickstart"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The console script of an environment with the wheel."""
    if named := os.environ.get("VERL_EXT_WHEEL_PYTHON"):
        yield Path(named).with_name("verl-ext")
        return
    if shutil.which("uv") is None:
        pytest.skip("uv is not installed, which creates the environment; or set VERL_EXT_WHEEL_PYTHON")
    directory = tmp_path_factory.mktemp("wheel")
    wheel, environment = build_wheel(directory), directory / "venv"
    uv("venv", "--seed", "--python", sys.executable, environment)
    uv("pip", "install", "--python", environment / "bin/python", "--compile-bytecode", wheel)
    yield environment / "bin/verl-ext"
    shutil.rmtree(environment)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's current directory."""
    return tmp_path_factory.mktemp("user")


def run(program: Path, place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = f"{program.parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(["verl-ext", *words], cwd=place, env=environment, capture_output=True, text=True)


# One sequence: each test continues where the previous one ended


def test_training_before_setup_names_setup(program: Path, place: Path) -> None:
    if not list(program.parents[1].glob("lib/python*/site-packages/verl/")):
        done = run(program, place, "sft", "2")
        assert done.returncode == 2
        assert re.fullmatch(r"error: verl is not installed for .*; run `verl-ext setup`\n", done.stderr)
        assert os.listdir(place) == []


def test_setup_installs_verl_and_vllm_once(program: Path, place: Path) -> None:
    assert run(program, place, "setup").returncode == 0
    done = run(program, place, "setup")
    assert done.returncode == 0 and "Nothing to do" in done.stdout and "Next: verl-ext sft 2" in done.stdout


def test_quickstart_trains_in_current_directory(program: Path, place: Path) -> None:
    done = run(program, place, "sft", "2", "trainer.total_training_steps=60")
    assert done.returncode == 0, done.stderr
    assert f"Next: verl-ext eval watch {RUN}\n      verl-ext grpo 2\n" in done.stdout
    assert (place / RUN / "global_step_60" / "huggingface" / "model.safetensors").is_file()
    assert {*os.listdir(place)} == {".prepare.lock", "checkpoints", "data"}


def test_checkpoint_is_evaluated_and_listed(program: Path, place: Path) -> None:
    done = run(program, place, "eval", "watch", RUN, "datasets.quickstart.limit=10")
    assert done.returncode == 0, done.stderr
    assert (
        f"Next: verl-ext eval report {RUN} --baseline data/quickstart/model datasets.quickstart.limit=10\n"
        in done.stdout
    )
    for name, line in (("ls", r"^60 .*complete"), ("verify", r"^global_step_60: complete")):
        done = run(program, place, "checkpoint", name, RUN)
        assert done.returncode == 0 and re.search(line, done.stdout, re.M), done.stdout + done.stderr
    assert run(program, place, "health", RUN).returncode in (0, 1)
    assert run(program, place, "plan", "recipe=quickstart", "gpus=2", "hardware=cpu").returncode == 0


def test_grpo_starts_from_sft_checkpoint_with_vllm(program: Path, place: Path) -> None:
    done = run(program, place, "grpo", "2", "trainer.total_training_steps=1", "data.val_max_samples=8")
    assert done.returncode == 0, done.stderr
    assert "Finished: " in done.stdout
