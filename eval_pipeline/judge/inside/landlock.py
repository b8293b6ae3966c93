"""The confinement of the level `sandlock`: an answer may read what Python needs, write its directory, and no more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache")
_DEVICES = ("/dev/urandom", "/dev/random")


def policy_maker(site_packages: str, package_paths: list[str]) -> Callable[[str], Callable[[], None]]:
    """A function that makes the confinement for a directory, to be called in the process that it is for.

    Args:
        site_packages: where the package sandlock is installed.
        package_paths: what answers may read beside the system and Python.
    """
    sys.path.append(site_packages)
    import sandlock

    sys.path.remove(site_packages)
    wanted = (*_SYSTEM, *_DEVICES, sys.base_prefix, sys.base_exec_prefix, *package_paths)
    readable = [path for path in wanted if os.path.exists(path)]

    def policy_for(directory: str) -> Callable[[], None]:
        policy = sandlock.Sandbox(fs_readable=readable, fs_writable=[directory, "/dev/null"])
        return lambda: sandlock.confine(policy)

    return policy_for
