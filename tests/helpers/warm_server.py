"""The server of a warm start: imports everything, then forks commands; `warm.py` starts it and talks to it.

A fork differs from a new process in these points, and this is what is done about each:

- `/proc/PID/cmdline` and `/proc/PID/environ` are rewritten in place, because the launcher finds its ranks by them.
- File descriptors from 3 up are replaced by `/dev/null`: a rank must not hold the launcher's `run.lock`. They are not
  closed, because objects of the process before the fork still own their numbers and close them when they are collected.
- Random states are seeded from the operating system, because all forks would share the server's.
- String hashes depend on `PYTHONHASHSEED`, which a fork cannot change. There are two servers with different seeds, and
  consecutive starts alternate between them, so a result that depends on the order of a set still shows.
- Variables that are read while modules are imported must be the server's; otherwise the command starts cold.
- The server has one thread when it forks, and imports nothing that starts another one.
- Destructors do not run at the end; `atexit` functions and the joining of threads do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import re
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers import ROOT
from tests.helpers.warm import EXECUTE_CHILD, FORKED, PIPES, bound, module_of, read_at_import, split_words


def serve(imports: str, path: str) -> NoReturn:
    """Import everything, then fork a process for each request until no test process is left."""
    base_path = [entry for entry in sys.path[1:] if entry != str(ROOT)]
    _room()
    gc.disable()
    import_all(imports)
    gc.freeze()
    gc.enable()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"something that was imported has started threads: {threads}"
    subprocess.Popen._execute_child = _forking(base_path)  # type: ignore[method-assign]
    multiprocessing.util.spawnv_passfds = _forking_spawn(base_path)  # type: ignore[assignment]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen(64)
    os.rename(path + ".new", path)
    Server(listener, base_path).run()
    for directory in _wandb_directories():
        directory.cleanup()
    os._exit(0)


class Server:
    """Forks commands and reports their ends.

    Args:
        listener: socket to which test processes connect.
        base_path: `sys.path` without the entries of `PYTHONPATH` and of the working directory.
    """

    def __init__(self, listener: socket.socket, base_path: list[str]) -> None:
        self.listener, self.base_path = listener, base_path
        self.clients: set[socket.socket] = set()
        self.commands: dict[int, tuple[int, socket.socket]] = {}  # by process descriptor
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the last test process has gone."""
        had_clients = False
        while self.clients or self.commands or not had_clients:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    self.greet(self.listener.accept()[0])
                    had_clients = had_clients or bool(self.clients)
                elif isinstance(key.fileobj, int):
                    self.report(key.fileobj)
                else:
                    self.part(key.fileobj)  # type: ignore[arg-type]

    def greet(self, connection: socket.socket) -> None:
        header, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
        length = int.from_bytes(header, "big")
        if not length:
            self.clients.add(connection)
            self.selector.register(connection, selectors.EVENT_READ)
            connection.sendall(b"ready\n")
            return
        request = json.loads(connection.recv(length, socket.MSG_WAITALL))
        pid = _forked(request, dict(enumerate(descriptors)), self.base_path, None)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"%d\n" % pid)
        process = os.pidfd_open(pid)
        self.commands[process] = pid, connection
        self.selector.register(process, selectors.EVENT_READ)
        self.selector.register(connection, selectors.EVENT_READ)

    def report(self, process: int) -> None:
        """A command has ended."""
        pid, connection = self.commands.pop(process)
        _, status, usage = os.wait4(pid, 0)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d %.3f\n" % (status, usage.ru_utime + usage.ru_stime))
        self.selector.unregister(process)
        os.close(process)
        if connection.fileno() != -1:
            self.selector.unregister(connection)
            connection.close()

    def part(self, connection: socket.socket) -> None:
        """A test process has closed a connection; end its commands, which no one else would end."""
        self.selector.unregister(connection)
        connection.close()
        self.clients.discard(connection)
        for pid, other in self.commands.values():
            if other is connection:
                os.kill(pid, signal.SIGKILL)


def import_all(imports: str) -> None:
    """Import what commands import, so that a fork has it; nothing may be computed or started here."""
    from verl_ext.trainer.stages import STAGES

    if imports == "vllm":
        from verl_ext.vllm_setup import prepare_vllm_environment

        prepare_vllm_environment()
    for name in (*MODULES, *(VLLM_MODULES if imports == "vllm" else ())):
        importlib.import_module(name)
    for stage in STAGES.values():
        stage.trainer_class()
    for directory in _wandb_directories():
        atexit.unregister(directory.cleanup)


def _wandb_directories() -> list[tempfile.TemporaryDirectory[str]]:
    """The directories that W&B creates when it is imported: all forks use them, so none may remove them at its end."""
    from wandb.sdk.artifacts.artifact import Artifact
    from wandb.sdk.data_types._private import MEDIA_TMP

    return [MEDIA_TMP, Artifact._TMP_DIR]


MODULES = (
    *("torch.distributed.run", "torch.distributed.launcher.api", "torch.utils.tensorboard", "wandb", "pandas"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2"),
    *("verl_ext.launch.__main__", "verl_ext.launch.configure", "verl_ext.launch.preflight", "verl_ext.launch.run"),
    *("verl_ext.launch.torchrun", "verl_ext.trainer.__main__", "verl_ext.trainer.trainer"),
    *("verl_ext.checkpoint.__main__", "verl_ext.health.__main__", "eval_pipeline.__main__"),
)
VLLM_MODULES = ("vllm", "vllm.entrypoints.llm")


def run_command(request: Mapping[str, Any], streams: Mapping[int, int], base_path: list[str]) -> NoReturn:
    """In a fork: run `python -m MODULE ...` as a new process would, and end."""
    for number, descriptor in streams.items():
        if descriptor != -1:
            os.dup2(descriptor, number)
    _release_descriptors(request.get("keep", ()))
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    environment = {name: value for name, value in request["env"].items() if name != "WARM_ROOM"}
    _show(request["words"], environment)
    os.environ.clear()
    os.environ.update(environment)
    _reset_signals()
    _reseed()
    _reset_modules()
    options, [main, *words] = split_words(request["words"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through="-u" in options or "PYTHONUNBUFFERED" in environment)  # type: ignore[union-attr]
    added = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [os.getcwd(), *filter(None, added), *base_path]
    sys.argv = [main, *words]
    if "HOLD" in environment:
        runpy.run_path(str(ROOT / "tests/faults/sitecustomize.py"))
    if SPAWNED.match(main):
        sys.argv[0] = "-c"
        _exit_after(lambda: exec(main, {}))
    _exit_after(lambda: runpy.run_module(main, run_name="__main__", alter_sys=True))


def _release_descriptors(kept: Iterable[int]) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in {*kept, nothing}:
            with contextlib.suppress(OSError):  # the one of the listing itself has gone
                os.fstat(number)
                os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _show(words: Iterable[str], environment: Mapping[str, str]) -> None:
    """Write a command line and an environment where the kernel shows this process's own."""
    fields = _memory_fields()
    code, code_end, stack, data, data_end, heap = (fields[n - 1] for n in (26, 27, 28, 45, 46, 47))
    arguments, arguments_end, variables, variables_end = _room()
    variable_words = [f"{name}={value}" for name, value in environment.items()]
    arguments_end = _overwrite(arguments, arguments_end, words)
    variables_end = _overwrite(variables, variables_end, variable_words)
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    places = (code, code_end, data, data_end, heap, libc.sbrk(0), stack)
    memory_map = MemoryMap(places + (arguments, arguments_end, variables, variables_end), 0, 0, 0xFFFFFFFF)
    size = ctypes.c_ulong(ctypes.sizeof(memory_map))
    # Trims both blocks. A kernel that does not allow it shows empty words behind the command line.
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(memory_map), size, ctypes.c_ulong(0))


def _memory_fields() -> list[int]:
    """The fields of `/proc/self/stat` as proc(5) numbers them from 1; the first three are 0 here."""
    return [0, 0, 0, *map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[1:])]


@functools.cache
def _room() -> list[int]:
    """Begin and end of the server's own arguments and variables; forks inherit the answer."""
    return _memory_fields()[47:51]


PR_SET_MM, PR_SET_MM_MAP = 35, 14  # from <linux/prctl.h>


class MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map`: where code, data, heap, stack, arguments and variables begin and end."""

    _fields_ = [
        ("places", ctypes.c_uint64 * 11),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def _overwrite(begin: int, end: int, parts: Iterable[str]) -> int:
    """Write zero-terminated words into a block of this process's memory; returns where they end."""
    content = b"".join(os.fsencode(part) + b"\0" for part in parts)
    assert len(content) <= end - begin, "the command line or the environment is too long for a warm start"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, content, len(content))
    return begin + len(content)


def _reset_signals() -> None:
    """The handlers that a new interpreter has; what was ignored stays ignored."""
    asked = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGQUIT)
    for number in (*asked, signal.SIGCHLD, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def _reseed() -> None:
    import random

    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.seed()


def _reset_modules() -> None:
    """State of modules that belongs to one process."""
    import logging
    import weakref

    import verl_ext.metrics.timing

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):  # the launcher silences torchrun, not its ranks
            logging.getLogger(name).setLevel(logging.NOTSET)
    verl_ext.metrics.timing.startup.__init__()  # type: ignore[misc]
    multiprocessing.resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    multiprocessing.resource_tracker._resource_tracker._pid = None  # type: ignore[attr-defined]
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # a rank must not remove the launcher's files
    for name in [name for name in sys.modules if FORKED.fullmatch(name.removesuffix(".__main__"))]:
        if name.endswith(".__main__") or name.startswith("tests.ranks."):
            del sys.modules[name]  # runpy runs it again


def _exit_after(call: Callable[[], object]) -> NoReturn:
    """Run something as the main program, and end as an interpreter does."""
    code, interrupted = 0, False
    try:
        call()
    except SystemExit as end:
        if isinstance(end.code, int):
            code = end.code
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        traceback.print_exception(error)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code & 0xFF)


def _forking(base_path: list[str]) -> Callable[..., None]:
    """`Popen._execute_child` that forks `python -m MODULE ...` in place of executing it, for modules of `FORKED`."""

    def execute_child(process: subprocess.Popen[Any], *args: Any, **kwargs: Any) -> None:
        given = bound(process, args, kwargs)
        words = [given["args"]] if isinstance(given["args"], str | bytes | os.PathLike) else list(given["args"])
        words = [os.fsdecode(word) for word in words]
        environment = dict(os.environ if given["env"] is None else given["env"])
        module = module_of(words)
        if module is None or not is_loaded(module) or read_at_import(environment) != read_at_import(os.environ):
            return EXECUTE_CHILD(process, *args, **kwargs)
        request = {
            "words": words,
            "env": environment,
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
            "keep": given["pass_fds"],
        }
        streams = dict(enumerate([given["p2cread"], given["c2pwrite"], given["errwrite"]]))
        process.pid = _forked(request, streams, base_path, given["preexec_fn"])
        process._child_created = True  # type: ignore[attr-defined]
        process._close_pipe_fds(*(given[name] for name in PIPES))  # type: ignore[attr-defined]

    return execute_child


def _forking_spawn(base_path: list[str]) -> Callable[..., int]:
    """`multiprocessing.util.spawnv_passfds` that forks the workers of a spawning context."""
    execute = multiprocessing.util.spawnv_passfds

    def spawn(path: str, args: list[str], passfds: Sequence[int]) -> int:
        words = [os.fsdecode(word) for word in args]
        if not any(map(SPAWNED.match, words)):  # the resource tracker
            return execute(path, args, passfds)  # type: ignore[arg-type]
        request = {"words": words, "env": dict(os.environ), "cwd": os.getcwd(), "session": False, "keep": passfds}
        return _forked(request, {}, base_path, None)

    return spawn


def _forked(
    request: Mapping[str, Any],
    streams: Mapping[int, int],
    base_path: list[str],
    before: Callable[[], object] | None,
) -> int:
    """Process id of a fork of this process that runs a command; `before` is `preexec_fn`."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if pid := os.fork():
        return pid
    try:
        if before is not None:
            before()
        run_command(request, streams, base_path)
    finally:
        os._exit(1)


SPAWNED = re.compile("from multiprocessing.spawn import spawn_main")


def is_loaded(module: str) -> bool:
    """Whether a module that a command starts is one of those that fork, and what it imports is there."""
    if module == "eval_pipeline.engines.vllm_process":
        return "vllm" in sys.modules
    return FORKED.fullmatch(module) is not None


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
