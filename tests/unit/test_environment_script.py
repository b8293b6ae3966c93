"""scripts/environment.sh never changes an environment outside this checkout."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import ROOT


@pytest.mark.parametrize("stamp", [None, "cpu of-other-requirements"])
def test_symlinked_environment_is_rejected_and_unchanged(tmp_path: Path, stamp: str | None) -> None:
    shared, checkout = tmp_path / "shared", tmp_path / "checkout"
    (shared / "bin").mkdir(parents=True)
    (shared / "bin/python").write_text("others use this\n")
    if stamp is not None:
        (shared / "requirements.stamp").write_text(stamp + "\n")
    before = {path: path.read_text() for path in shared.rglob("*") if path.is_file()}
    shutil.copytree(ROOT / "requirements", checkout / "requirements")
    (checkout / ".venv").symlink_to(shared)
    environment = {name: value for name, value in os.environ.items() if name != "VERL_EXT_PYTHON"}
    script = f"set -euo pipefail; source {ROOT}/scripts/environment.sh; choose_python"
    run = subprocess.run(["bash", "-c", script], cwd=checkout, env=environment, capture_output=True, text=True)
    assert run.returncode == 2
    assert "link" in run.stderr and "VERL_EXT_PYTHON" in run.stderr
    assert {path: path.read_text() for path in shared.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("is_ready", [True, False])
def test_directory_of_another_user_is_used_if_its_environment_is_ready(tmp_path: Path, is_ready: bool) -> None:
    (tmp_path / "requirements").symlink_to(ROOT / "requirements")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv.lock").mkdir()  # cannot be opened for writing, even by root
    script = f"set -euo pipefail; source {ROOT}/scripts/environment.sh; "
    if is_ready:
        script += "stamp_of gpu > .venv/requirements.stamp; "
    environment = {name: value for name, value in os.environ.items() if name != "VERL_EXT_PYTHON"}
    run = subprocess.run(
        ["bash", "-c", script + "choose_python; echo $PYTHON"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    if is_ready:
        assert (run.stdout, run.stderr) == (f"{tmp_path}/.venv/bin/python\n", "")
    else:
        reason = f"error: .venv cannot be created in {tmp_path} (Is a directory); make it writable or"
        assert run.returncode == 2 and run.stderr == f"{reason} set VERL_EXT_PYTHON\n"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("echo 3 9", "is Python 3.9; it must be 3.11 to 3.13"),
        ("echo 4 12", "is Python 4.12; it must be 3.11 to 3.13"),
        ("exit 1", "is '{}', which does not run as Python; correct or unset it"),
    ],
)
def test_unsupported_interpreter_is_rejected(tmp_path: Path, code: str, problem: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{code}\n")
    python.chmod(0o755)
    environment = {**os.environ, "VERL_EXT_PYTHON": str(python)}
    script = "source scripts/environment.sh; choose_python"
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 2 and run.stderr == f"error: VERL_EXT_PYTHON {problem.format(python)}\n"


def test_variables_that_break_python_are_unset() -> None:
    environment = {**os.environ, "VERL_EXT_PYTHON": sys.executable, "PYTHONHOME": "/nowhere", "PYTHONOPTIMIZE": "2"}
    script = "source scripts/environment.sh; choose_python; $PYTHON -c 'import sys; print(sys.flags.optimize)'"
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("0\n", "")


def test_only_a_whole_argument_asks_for_help() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "VERL_EXT_PYTHON"}
    for argument, is_help in (("name=my -h run", False), ("-h", True), ("--help", True)):
        script = "source scripts/environment.sh; ensure_venv() { echo created; }; "
        script += f"choose_python_for 2 '{argument}'; $PYTHON -c 'import verl_ext'"
        run = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.stdout == ("" if is_help else "created\n"), argument
        assert not is_help or (run.returncode, run.stderr) == (0, ""), argument


def test_help_uses_interpreter_of_user(tmp_path: Path) -> None:
    environment = {**os.environ, "VERL_EXT_PYTHON": sys.executable}
    script = "source scripts/environment.sh; find_base_python() { return 2; }; choose_python_for --help; echo $PYTHON"
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout == f"{sys.executable}\n"


def test_scripts_enter_their_own_checkout_and_leave_no_child(tmp_path: Path) -> None:
    (tmp_path / ROOT.name / "eval_pipeline").mkdir(parents=True)  # where CDPATH would lead
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$1" in -E) echo 3 12; exec >&-; sleep 0.5;; *) pgrep -P $$; pwd;; esac\n')
    python.chmod(0o755)
    environment = {**os.environ, "VERL_EXT_PYTHON": str(python), "CDPATH": str(tmp_path)}
    words = ["bash", f"{ROOT.name}/eval_pipeline/run.sh", "check"]
    run = subprocess.run(words, cwd=ROOT.parent, env=environment, capture_output=True, text=True)
    assert run.stdout == f"{ROOT}\n"


def test_python_versions_match_pyproject(tmp_path: Path) -> None:
    settings = (ROOT / "pyproject.toml").read_text()
    allowed = re.search(r'^requires-python = ">=(3\.\d+),<3\.(\d+)"', settings, re.MULTILINE)
    assert allowed is not None
    least, newest = allowed[1], f"3.{int(allowed[2]) - 1}"
    (tmp_path / "sed").symlink_to(shutil.which("sed") or "")
    script = f"cd {ROOT}; PATH={tmp_path}; source scripts/environment.sh; find_base_python"
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert run.returncode == 2 and least in run.stderr and newest in run.stderr


@pytest.mark.parametrize("name", ["cpu", "gpu", "lmms"])
def test_torch_is_pinned_to_exact_build(name: str) -> None:
    """torchvision is built for the torch of the index and cannot be imported with another build."""
    text = (ROOT / f"requirements/{name}.txt").read_text()
    assert re.findall("^torch(=+)", text, re.MULTILINE) == ["==="]  # pip takes 2.13.0+cpu for ==2.13.0


def test_missing_lint_tools_are_reported_before_tests_run(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    environment = {**os.environ, "VERL_EXT_PYTHON": str(bare)}
    for words in ([], ["lint"]):
        run = subprocess.run(
            ["bash", "tests/run.sh", *words], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        assert run.returncode == 2 and run.stdout == ""
        assert run.stderr.startswith(f"error: {bare} has no ruff; install the packages of requirements/cpu.txt there")
