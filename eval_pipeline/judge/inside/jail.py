"""Where the answers of one supervisor run, and how all processes of a run are ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import kernel
from usage import MAX_FILES, ProcessTree, directory_usage, remove_tree

_TEMPORARY = "/tmp"
_PAUSE_S = 0.0005
"""Pause between two checks whether killed processes have died."""


class NamespaceJail:
    """Namespaces whose first process is this one.

    Args:
        tree: needs /proc, which answers do not see.
        nested: whether to enter new namespaces; otherwise this process is alone in a sandbox already.
        drop_user: whether the answer must first stop being root.
    """

    num_unlimited = 1
    """Tasks that the kernel counts in addition to those of an answer: the supervisor."""
    policy = None
    """No policy, because the namespaces confine the answer."""

    def __init__(self, tree: ProcessTree, nested: bool, drop_user: bool) -> None:
        if nested:
            kernel.enter_namespaces()
        self.drop_user = drop_user
        # these need /proc, which is hidden next
        tree.find_self()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        self._is_mounted = False

    def new_scratch_dir(self, file_mb: int) -> str:
        """An empty directory for the next run; nothing of the previous one is left."""
        mount = kernel.remount_scratch if self._is_mounted else kernel.mount_scratch
        mount(file_mb, MAX_FILES)
        self._is_mounted = True
        return _TEMPORARY

    def end_all(self, first: int) -> int:
        """End all other processes in the namespace; returns the exit status of the first, negative for a signal."""
        with suppress(ProcessLookupError):  # there is no other process
            os.kill(-1, signal.SIGKILL)
        reaper = _Reaper(first)
        reaper.reap()
        return reaper.status

    def too_large(self, file_mb: int) -> bool:
        """Whether files exceed their limit, which the file system itself enforces."""
        return False

    def close(self) -> None:
        """Do nothing, because the namespaces end with this process."""


class HostJail:
    """Runs answers as host processes without namespaces, and finds them through /proc.

    A process can leave its group, but then becomes a child of this one.

    Args:
        tree: finds the processes of an answer.
        policy_for: creates the confinement for a directory; None without one.
    """

    num_unlimited = -1
    """No kernel limit, which would count all tasks of the user; the process tree counts an answer's tasks instead."""
    drop_user = False
    """Root stays root, because the user `nobody` could not read a Python in root's home."""

    def __init__(self, tree: ProcessTree, policy_for: Callable[[str], Callable[[], None]] | None) -> None:
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        tree.find_self()
        self._tree = tree
        self._policy_for = policy_for
        self._directory: str | None = None
        self.policy: Callable[[], None] | None = None

    def new_scratch_dir(self, file_mb: int) -> str:
        """An empty directory for the next run; nothing of the previous one is left."""
        self.close()
        # Not with `tempfile`, which would remember /tmp, where the answer may not write. The number is the zygote's: if
        # an answer kills this process, the server removes the directories with that number.
        self._directory = f"{_TEMPORARY}/judge_{os.getppid()}_{os.urandom(8).hex()}"
        os.mkdir(self._directory, 0o700)
        self.policy = None if self._policy_for is None else self._policy_for(self._directory)
        return self._directory

    def end_all(self, first: int) -> int:
        """End every descendant; returns the exit status of the first, negative for a signal.

        Reading /proc is not atomic and may miss a new or orphaned process. But every orphan becomes a child of this
        process, so the run is over only once this process has no children.
        """
        reaper = _Reaper(first)
        self._tree.counted = []
        while True:
            for pid in self._tree.descendants():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if reaper.reap(os.WNOHANG):
                return reaper.status
            time.sleep(_PAUSE_S)

    def too_large(self, file_mb: int) -> bool:
        """Whether the answer has too many or too large files; deleted files count while they are open."""
        num_files, num_bytes = directory_usage(self._directory or "/nowhere")
        return num_files > MAX_FILES or num_bytes + self._tree.deleted_bytes() > file_mb << 20

    def close(self) -> None:
        """Remove the directory."""
        if self._directory is not None:
            # no verdict depends on it, and the server tries again and reports a failure (`sandbox.py`)
            with suppress(OSError):
                remove_tree(self._directory)
            self._directory = None


class _Reaper:
    """Waits for children, and keeps the exit status of the first process of a run."""

    def __init__(self, first: int) -> None:
        self._first = first
        self.status = 0

    def reap(self, options: int = 0) -> bool:
        """Reap all children, or with `os.WNOHANG` only those that have ended; returns whether none is left."""
        while True:
            try:
                pid, raw = os.waitpid(-1, options)
            except ChildProcessError:
                return True
            if pid == self._first:
                self.status = os.waitstatus_to_exitcode(raw)
            if pid == 0:
                return False


Jail = NamespaceJail | HostJail
