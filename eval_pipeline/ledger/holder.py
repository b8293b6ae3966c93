"""Who holds a claim, and whether that process is still there."""

from __future__ import annotations

import os
import socket
import sqlite3
import time
from dataclasses import dataclass

from verl_ext.processes import pid_namespace, start_ticks

EXPIRY_S = 120.0
"""A process of another machine that was not heard of for so long is dead."""
RENEWAL_S = 15.0
"""How often a process lets itself be heard of."""


@dataclass(frozen=True)
class Holder:
    """A process, told apart from a later one of the same number by its start."""

    host: str
    pid: int
    born: int
    """Clock ticks from the machine's boot to the start of the process."""

    @staticmethod
    def this_process() -> Holder:
        """The process that asks."""
        return Holder(_host(), os.getpid(), start_ticks(os.getpid()) or 0)

    @property
    def key(self) -> str:
        """All of it, as the ledger keeps it."""
        return f"{self.host} {self.pid} {self.born}"

    @staticmethod
    def of_key(key: str) -> Holder:
        """Inverse of `key`."""
        host, pid, born = key.rsplit(" ", 2)
        return Holder(host, int(pid), int(born))

    def has_died(self, heard: float) -> bool:
        """Whether the process is gone: known at once on this machine, after `EXPIRY_S` of silence on another.

        Args:
            heard: seconds since 1970 when it was last heard of.
        """
        if self.host == _host():
            return start_ticks(self.pid) != self.born
        return time.time() > heard + EXPIRY_S

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition('/')[0]}"


def has_died(row: sqlite3.Row) -> bool:
    """Whether the holder of a running job's row is gone."""
    return Holder(row["host"], row["pid"], row["born"]).has_died(row["renewed"])


def _host() -> str:
    """The machine and its process namespace: machines may share a name, and containers number processes alike."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}/{pid_namespace()}"
