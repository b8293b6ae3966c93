"""A supervisor: runs answers one at a time, each once per test, and reports what it observed from outside.

With namespaces, it serves many answers, so it never holds data of one answer in memory that the next would inherit: it
passes program and input on unread, and reads output into memory that no fork inherits.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import answer
import confinement
import kernel
import protocol
from jail import HostJail, Jail, NamespaceJail
from usage import ProcessTree, Usage

_MB = 1 << 20
_FIRST_LOOK_S = 0.02
_LOOK_S = 0.04
_CHUNK = 1 << 16
_TAIL = 2048
_STATUS = 1 << 16


def work(fds: list[int], options: dict[str, Any], policy_for: Callable[[str], Callable[[], None]] | None) -> None:
    """Serve the server connected to the one descriptor, in the jail that the zygote's options select."""
    tree = ProcessTree(unforked(mmap.PAGESIZE))
    jail: Jail
    if options["own_namespaces"]:
        single_use = options["single_use"]
        jail = NamespaceJail(tree, nested=not single_use, drop_user=single_use and options["drop_user"])
    else:
        jail = HostJail(tree, policy_for)
    Supervisor(socket.socket(fileno=fds[0]), jail, tree).serve()


class Supervisor:
    """Runs answers in a jail, for the server behind the connection."""

    def __init__(self, control: socket.socket, jail: Jail, tree: ProcessTree) -> None:
        self._control, self._jail, self._tree = control, jail, tree
        # these hold the captured output of one run after another
        self._output = unforked(_CHUNK)
        self._errors, self._status = unforked(_TAIL + _CHUNK), unforked(_STATUS + _CHUNK)

    def serve(self) -> None:
        """Run an answer for each request, until the server closes the connection."""
        # signals from inside new namespaces reach their first process only if it handles them
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        try:
            while (received := protocol.receive(self._control, max_fds=2)) is not None:
                message, _, fds = received
                if message["op"] != "run":
                    continue  # the end of a run that had ended by itself
                report, parts = self._run(message, fds)
                if report["reason"] == "gone":
                    return
                protocol.send_parts(self._control, report, parts)
        finally:
            self._jail.close()

    def _run(self, message: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], list[memoryview]]:
        """Run an answer once; returns the report, and the captured parts, whose sizes are in the report."""
        limits, is_program = message["limits"], message["kind"] == "program"
        resource_limits = confinement.resource_limits(limits, self._jail.num_unlimited)
        directory = self._jail.new_scratch_dir(limits["file_mb"])
        outer, inner = zip(*(os.pipe() for _ in range(3)))
        null = os.open(os.devnull, os.O_RDWR)
        program, other = fds
        files = confinement.Files(
            program=program,
            stdin=other if is_program else null,
            stdout=inner[0] if is_program else null,
            stderr=inner[1],
            rpc=null if is_program else other,
            status=inner[2],
        )
        started, cpu_s = time.monotonic(), _children_cpu_s()
        pid = os.fork()
        if pid == 0:
            answer.run(resource_limits, message["kind"], files, directory, self._jail)
        for fd in (*inner, null, *fds):
            os.close(fd)
        captures = self._captures(outer, int(limits["output_mb"] * _MB))
        reason, idle_s = self._watch(pid, captures, limits)
        wall_s = time.monotonic() - started
        status = self._jail.end_all(pid)
        if reason in ("exited", "ended") and self._jail.too_large(limits["file_mb"]):
            reason = "files"  # whether or not the supervisor looked in time
        for capture in captures:
            capture.finish()
        cpu_s = _children_cpu_s() - cpu_s
        parts = [capture.kept for capture in captures]
        report = {
            "reason": "cpu" if cpu_s > limits["cpu_s"] else reason,
            "exit": status,
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "idle_s": idle_s,
            "sizes": [len(part) for part in parts],
        }
        return report, parts

    def _captures(self, fds: Sequence[int], max_output: int) -> list[PipeCapture]:
        """The beginning of standard output, the end of standard error, and what `answer.py` reports about compiling."""
        if len(self._output) < max_output + _CHUNK:
            self._output = unforked(max_output + _CHUNK)
        return [
            PipeCapture(fds[0], self._output, max_output),
            PipeCapture(fds[1], self._errors, _TAIL, last=True),
            PipeCapture(fds[2], self._status, _STATUS),
        ]

    def _watch(self, pid: int, captures: list[PipeCapture], limits: dict[str, Any]) -> tuple[str, float]:
        """Wait until a run is over. The caller kills its processes.

        Args:
            pid: the run's first process, a child of this one.
            captures: the run's pipes.
            limits: the fields of `ResourceLimits`.

        Returns:
            "exited"; the limit that it hit ("cpu", "wall", "memory", "processes", "files"); "ended" if the server ended
            the run; or "gone" if the server is gone. And for how many seconds all its processes were seen asleep.
        """
        pidfd = kernel.pidfd_open(pid)
        poll = select.poll()
        by_fd = {capture.fd: capture for capture in captures}
        control_fd = self._control.fileno()
        for fd in (pidfd, control_fd, *by_fd):
            poll.register(fd, select.POLLIN)
        started = time.monotonic()
        deadline, next_look = started + limits["wall_s"], started + _FIRST_LOOK_S
        cpu_s_before = _children_cpu_s()
        last_look, idle_s, has_read = started, 0.0, False
        try:
            while True:
                ready = [fd for fd, _ in poll.poll(max(0.0, min(deadline, next_look) - time.monotonic()) * 1000)]
                for fd in ready:
                    if fd in by_fd:
                        has_read = True  # the run may have waited for this process
                        if not by_fd[fd].read():
                            poll.unregister(fd)
                if control_fd in ready and protocol.receive(self._control) is None:
                    return "gone", idle_s
                if pidfd in ready:
                    return "exited", idle_s
                if control_fd in ready:
                    return "ended", idle_s
                if time.monotonic() >= deadline:
                    return "wall", idle_s
                if (now := time.monotonic()) >= next_look:
                    usage = self._tree.usage()
                    if excess := self._excess(usage, limits, _children_cpu_s() - cpu_s_before):
                        return excess, idle_s
                    if usage.is_asleep and not has_read:
                        # not what happened while this process itself waited for a processor
                        idle_s += min(now - last_look, 2 * _LOOK_S)
                    last_look, has_read = now, False
                    next_look = time.monotonic() + _LOOK_S
        finally:
            os.close(pidfd)

    def _excess(self, usage: Usage, limits: dict[str, Any], waited_cpu_s: float) -> str:
        """The limit that the processes exceed now; empty if they exceed none."""
        if usage.cpu_s + waited_cpu_s > limits["cpu_s"]:
            return "cpu"
        max_memory = limits["memory_mb"] * _MB
        if usage.memory_bytes + self._tree.max_buffer_bytes(usage.num_tasks) > max_memory:
            max_memory -= self._tree.buffer_bytes()
        if usage.memory_bytes > max_memory and (usage.num_tasks == 1 or self._tree.shared_memory() > max_memory):
            return "memory"
        # never reached where the kernel counts tasks
        if usage.num_tasks > limits["num_processes"] + 1:
            return "processes"
        return "files" if self._jail.too_large(limits["file_mb"]) else ""


def _children_cpu_s() -> float:
    """CPU seconds of all descendants that have been waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


# Output of answers


def unforked(size: int) -> mmap.mmap:
    """Memory that forks do not inherit, so that no answer finds an earlier answer's output."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


class PipeCapture:
    """Reads a pipe to its end and keeps the beginning or the end of its data, never as a Python object.

    Args:
        fd: file descriptor of the pipe.
        memory: where to keep the data, larger than `max_bytes` by a chunk.
        max_bytes: bytes to keep.
        last: whether to keep the end.
    """

    def __init__(self, fd: int, memory: mmap.mmap, max_bytes: int, last: bool = False) -> None:
        self.fd = fd
        self._memory, self._max_bytes, self._last = memory, max_bytes, last
        self._view = memoryview(memory)
        self._size = 0
        os.set_blocking(fd, False)

    @property
    def kept(self) -> memoryview:
        """The kept data; valid until the next capture in the same memory."""
        return self._view[: self._size]

    def read(self) -> bool:
        """Read one chunk; False at the end of the pipe, or if it is empty for now."""
        try:
            count = os.readv(self.fd, [self._view[self._size : self._size + _CHUNK]])
        except BlockingIOError:
            return False
        self._size += count
        if (excess := self._size - self._max_bytes) > 0:
            if self._last:
                self._memory.move(0, excess, self._max_bytes)
            self._size = self._max_bytes
        return count > 0

    def finish(self) -> None:
        """Read the rest, once no process can write."""
        while self.read():
            pass
        os.close(self.fd)
