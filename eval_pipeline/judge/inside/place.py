"""Where the answers of one supervisor run, and how everything of a run is ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import directories
import kernel
import namespaces
from census import Census

_TEMPORARY = "/tmp"
_PAUSE_S = 0.0005
"""Between two looks at processes that take their time to die."""


class NamespacePlace:
    """Inside namespaces of its own, where this process is the first one."""

    num_unlimited = 1
    """Tasks that the kernel counts beside those of an answer: the supervisor."""
    policy = None
    """Makes a confinement that needs a library; not needed here."""

    def __init__(self, census: Census, nested: bool, drop_user: bool) -> None:
        """Enter new namespaces when `nested`; else this process is alone in a sandbox already, perhaps as root."""
        if nested:
            namespaces.enter()
        self.drop_user = drop_user
        """Whether the answer must first stop being root."""
        # like the census it needs /proc, which is hidden next
        census.find_self()
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        self._furnished = False

    def fresh_directory(self, file_mb: int) -> str:
        """An empty directory for the next run; nothing of the one before is left."""
        (namespaces.refurnish if self._furnished else namespaces.furnish)(file_mb)
        self._furnished = True
        return _TEMPORARY

    def end_all(self, first: int) -> int:
        """End every process here but this one; returns the exit status of the first, negative for a signal."""
        with suppress(ProcessLookupError):  # there is no other process
            os.kill(-1, signal.SIGKILL)
        return _Reaper(first).wait_for_all()

    def too_large(self, file_mb: int) -> bool:
        """Whether files take more than they may; the file system itself sees to that."""
        return False

    def close(self) -> None:
        """The namespaces end with this process."""


class HostPlace:
    """On the machine itself: a process cannot be kept from leaving its group, but becomes this one's child then."""

    num_unlimited = -1
    """The kernel counts all tasks of the user, so the census must do it."""
    drop_user = False
    """Even root stays root, or it could not read a Python in its home."""

    def __init__(self, census: Census, policy_for: Callable[[str], Callable[[], None]] | None) -> None:
        """Adopt orphans; `policy_for` makes the confinement for a directory."""
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
        census.find_self()
        self._census = census
        self._policy_for = policy_for
        self._directory: str | None = None
        self.policy: Callable[[], None] | None = None

    def fresh_directory(self, file_mb: int) -> str:
        """An empty directory for the next run; nothing of the one before is left."""
        self.close()
        # Not through `tempfile`, which would remember /tmp for the answer, who may not write there. The number is the
        # zygote's: the server removes what bears it, should an answer have killed this process.
        self._directory = f"{_TEMPORARY}/judge_{os.getppid()}_{os.urandom(8).hex()}"
        os.mkdir(self._directory, 0o700)
        self.policy = None if self._policy_for is None else self._policy_for(self._directory)
        return self._directory

    def end_all(self, first: int) -> int:
        """End every descendant; returns the exit status of the first, negative for a signal.

        A look at /proc is not atomic and may miss one that was just born or orphaned. But every orphan becomes this
        process's child, so that without children it has no descendants: only then it is over.
        """
        reaper = _Reaper(first)
        self._census.counted = []
        while True:
            for pid in self._census.descendants():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if reaper.wait_for_dead():
                return reaper.status
            time.sleep(_PAUSE_S)

    def too_large(self, file_mb: int) -> bool:
        """Whether its files are too many or take more than they may; deleted ones count while they are open."""
        num_files, num_bytes = directories.usage(self._directory or "/nowhere")
        return num_files > directories.MOST_FILES or num_bytes + self._census.deleted_bytes() > file_mb << 20

    def close(self) -> None:
        """Remove the directory."""
        if self._directory is not None:
            # a verdict does not depend on it, and the server tries again and reports a failure (`leftovers.py`)
            with suppress(OSError):
                directories.remove_tree(self._directory)
            self._directory = None


class _Reaper:
    """Waits for children, and keeps the exit status of the one that was first."""

    def __init__(self, first: int) -> None:
        """Nothing is waited for yet."""
        self._first = first
        self.status = 0

    def wait_for_all(self) -> int:
        """Wait until no child is left; returns the status."""
        while not self._reap(0):
            pass
        return self.status

    def wait_for_dead(self) -> bool:
        """Take those that have ended; returns whether no child is left."""
        return self._reap(os.WNOHANG)

    def _reap(self, options: int) -> bool:
        while True:
            try:
                pid, raw = os.waitpid(-1, options)
            except ChildProcessError:
                return True
            if pid == self._first:
                self.status = os.waitstatus_to_exitcode(raw)
            if pid == 0:
                return False
