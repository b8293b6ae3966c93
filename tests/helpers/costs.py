"""What each test file costs: `pytest -p tests.helpers.costs` prints a table when the session ends.

Columns: wall seconds, processor seconds of the pytest process and of every process of its tests that has ended, and the
number of processes that were started. Counting processes needs root, because the kernel reports forks to root only;
without it the column is empty.
"""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests.helpers import warm

NETLINK_CONNECTOR, CN_IDX_PROC, LISTEN, FORK = 11, 1, 1, 1
EVENT_OFFSET = 16 + 20  # behind the headers of netlink and of the connector


class ForkCounter(threading.Thread):
    """Counts the processes, not the threads, that this process and its descendants start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.family, self.count = {os.getpid()}, 0
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_CONNECTOR)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        self.socket.bind((0, CN_IDX_PROC))
        body = struct.pack("=IIIIHHI", CN_IDX_PROC, 1, 0, 0, 4, 0, LISTEN)
        self.socket.send(struct.pack("=IHHII", 16 + len(body), 3, 0, 0, os.getpid()) + body)

    def adopt(self, pid: int) -> None:
        """Count a process that a warm server forked for a test, and its descendants."""
        self.family.add(pid)
        self.count += 1

    def run(self) -> None:
        while True:
            try:
                message = self.socket.recv(4096)
            except OSError:
                continue  # the kernel dropped events because the buffer was full: the count is a lower bound
            if len(message) < EVENT_OFFSET + 32 or struct.unpack_from("=I", message, EVENT_OFFSET)[0] != FORK:
                continue
            _, parent, child, child_group = struct.unpack_from("=IIII", message, EVENT_OFFSET + 16)
            if parent in self.family and child == child_group:
                self.family.add(child)
                self.count += 1


class Costs:
    """Sums the costs of the tests per file; with xdist, each worker sends its sums to the controller."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
        self.forks: ForkCounter | None = None
        try:
            self.forks = ForkCounter()
            self.forks.start()
            warm.on_start.append(self.forks.adopt)
            warm.on_server.append(self.forks.family.discard)
        except OSError:
            self.forks = None

    def now(self) -> tuple[float, float, float]:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        processor_s = warm.processor_s + sum(usage.ru_utime + usage.ru_stime for usage in used)
        return time.monotonic(), processor_s, self.forks.count if self.forks else 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = self.now()
        result = yield
        sums = self.sums[item.nodeid.partition("::")[0]]
        for column, (start, end) in enumerate(zip(before, self.now())):
            sums[column] += end - start
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = dict(self.sums)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        for name, values in getattr(node, "workeroutput", {}).get("costs", {}).items():
            self.sums[name] = [old + new for old, new in zip(self.sums[name], values)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("costs")
        terminalreporter.write_line(f"{'wall s':>8} {'cpu s':>8} {'processes':>9}  file")
        for name, (wall, processor, processes) in sorted(self.sums.items(), key=lambda item: -item[1][0]):
            counted = f"{processes:9.0f}" if self.forks else " " * 9
            terminalreporter.write_line(f"{wall:8.1f} {processor:8.1f} {counted}  {name}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs(), "costs")
