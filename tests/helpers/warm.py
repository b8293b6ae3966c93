"""Warm start: commands are forked from a process that has already imported what they import.

`bash run_sft.sh 2` spends 6 of its 8 seconds on starting three interpreters that import torch, transformers and verl.
`popen` starts the same command in a fork of a server that has these modules loaded. The fork runs the product's entry
point with the same arguments, environment, working directory and standard streams, so parsing, locks, signals, exit
codes and messages are the product's. torchrun is real, too: where the launcher starts a rank, it is forked as well.
The product has no hook for this.

`warm_server.py` lists how a fork differs from a new process, and what is done about it.

`TESTS_COLD=1` starts every command as a new process.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.helpers import ROOT

START_S = 120
HASH_SEEDS = ("1", "2")
ARGUMENT_ROOM, ENVIRONMENT_ROOM = 32_000, 96_000  # bytes of the server's own blocks that forks may write into
FORKED = re.compile(
    r"verl_ext\.(launch|trainer|checkpoint|health|data\.prepare)|eval_pipeline(\.engines\.vllm_process)?"
    r"|torch\.distributed\.run|tests\.ranks\.\w+"
)
"""Modules that are started warm; others start as new processes."""
READ_AT_IMPORT = re.compile(
    r"(OMP|MKL|HF|TRANSFORMERS|TORCH|PYTORCH|VLLM|VERL|RAY|MALLOC|CUDA|PYTHON|JE|LD|KMP|NCCL|GLOO)_?\w*"
)
READ_LATER = re.compile(
    r"PYTHON(PATH|HASHSEED|UNBUFFERED)|GLOO_SOCKET_IFNAME|LD_LIBRARY_PATH|HF_TOKEN|RAY_(TMPDIR|USAGE_STATS_ENABLED)"
    r"|VERL_(EXT_\w+|FILE_LOGGER_PATH|LOGGING_LEVEL)|TORCHELASTIC_\w+|TORCH_NCCL_\w+|VLLM_\w+"
)
"""Exceptions to `READ_AT_IMPORT`: read later, or set by the launcher to the same value for every process."""
SCRIPTS = {
    str(ROOT / "run_sft.sh"): ("verl_ext.launch", "sft"),
    str(ROOT / "run_grpo.sh"): ("verl_ext.launch", "grpo"),
    str(ROOT / "eval_pipeline/run.sh"): ("eval_pipeline",),
}

processor_s = 0.0
"""Processor seconds of all warm commands of this process that have ended."""
on_start: list[Callable[[int], object]] = []
"""Called with the process id of each warm command."""
on_server: list[Callable[[int], object]] = []
"""Called with the process id of each server that this process starts."""


def popen(words: Sequence[str | os.PathLike[str]], *, imports: str = "torch", **options: Any) -> subprocess.Popen[Any]:
    """Start a command, warm if possible.

    Args:
        words: `bash run_sft.sh ...`, `python -m MODULE ...`, or any other command.
        imports: what the server has loaded: `torch`, or `vllm` for commands whose own processes run vLLM.
        options: arguments of `subprocess.Popen`; `preexec_fn` and others that a fork cannot apply start cold.

    Returns:
        The process; it has the interface of `subprocess.Popen`.
    """
    must_be_cold = os.environ.get("TESTS_COLD") or Path("/dev/nvidiactl").exists()  # CUDA does not survive a fork
    warm = None if must_be_cold else _warm_options([os.fspath(word) for word in words], options)
    if warm is None:
        return subprocess.Popen(words, **options)
    words, options = warm
    return WarmProcess(words, imports=imports, **options)


def run(
    words: Sequence[str | os.PathLike[str]], *, imports: str = "torch", timeout: float = 300, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, warm if possible, and return its output as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    with popen(words, imports=imports, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def _warm_options(words: list[str], options: dict[str, Any]) -> tuple[list[str], dict[str, Any]] | None:
    """The command line and options of a command's Python process; None if it must start cold."""
    if options.keys() - {"cwd", "env", "stdin", "stdout", "stderr", "text", "start_new_session"}:
        return None
    environment = dict(os.environ if options.get("env") is None else options["env"])
    typed = Path(os.fspath(options.get("cwd") or os.getcwd()), words[1])
    script = str(typed.resolve())  # also by a link, in another place than the repository
    if words[0] == "bash" and script in SCRIPTS:
        if environment.get("VERL_EXT_PYTHON") != sys.executable or {"--help", "-h"} & set(words):
            return None
        environment["VERL_EXT_CALLED_FROM"] = os.fspath(options.get("cwd") or os.getcwd())
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        words = [sys.executable, "-m", *SCRIPTS[script], *words[2:]]
        options = {**options, "cwd": typed.parents[len(Path(script).relative_to(ROOT).parts) - 1]}
    module = module_of(words)
    if module is None or not FORKED.fullmatch(module):
        return None
    if read_at_import(environment) != read_at_import(_server_environment()):
        return None
    return words, {**options, "env": environment}


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a process reads while it imports modules, and that a fork could not follow."""
    names = (name for name in environment if READ_AT_IMPORT.fullmatch(name) and not READ_LATER.fullmatch(name))
    return {name: environment[name] for name in names}


def _server_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def module_of(words: list[str]) -> str | None:
    """MODULE of `python [-u] -m MODULE ...`; None for any other command."""
    options, rest = split_words(words) if words[0] == sys.executable and "-m" in words else ([], [])
    return rest[0] if rest and options in ([], ["-u"]) else None


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """The interpreter's options, and the module with its arguments."""
    place = words.index("-m" if "-m" in words else "-c")
    return words[1:place], words[place + 1 :]


class WarmProcess(subprocess.Popen):
    """A process that a server forked. It is the server's child, so its end is awaited through the connection."""

    _turn = itertools.count()

    def __init__(self, words: list[str], *, imports: str, **options: Any) -> None:
        self._imports = imports
        super().__init__(words, **options)

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        given = bound(self, args, kwargs)
        streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
        request = {
            "words": given["args"],
            "env": given["env"],
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "session": given["start_new_session"],
        }
        self._connection = _connect(self._imports, HASH_SEEDS[next(self._turn) % len(HASH_SEEDS)])
        content = json.dumps(request).encode()
        descriptors = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        header = len(content).to_bytes(4, "big")
        socket.send_fds(self._connection, [header], descriptors)
        self._connection.sendall(content)
        self._close_pipe_fds(*(given[name] for name in PIPES))
        self.pid = int(_line(self._connection))
        self._child_created = True
        for call in on_start:
            call(self.pid)

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        global processor_s
        self._connection.settimeout(0.0 if wait_flags & os.WNOHANG else None)
        try:
            status, used = _line(self._connection).split()
        except BlockingIOError:
            return 0, 0
        processor_s += float(used)
        self._connection.close()
        return self.pid, int(status)


PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
EXECUTE_CHILD = subprocess.Popen._execute_child
_SIGNATURE = inspect.signature(EXECUTE_CHILD)


def bound(process: subprocess.Popen[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `Popen._execute_child` by name, whose order differs between Python versions."""
    return _SIGNATURE.bind(process, *args, **kwargs).arguments


def _line(connection: socket.socket) -> str:
    """The next line; a server writes each with one call."""
    text = connection.recv(64)
    if not text:
        raise AssertionError("the warm server has died; its log is in the directory of the session's temporary files")
    return text.decode().rstrip("\n")


@functools.cache
def _directory() -> Path:
    """Where the servers of a test session listen; all workers of pytest-xdist share them."""
    if "TESTS_WARM_DIRECTORY" not in os.environ:  # tests/conftest.py sets it for all workers
        os.environ["TESTS_WARM_DIRECTORY"] = tempfile.mkdtemp(prefix="warm")
    return Path(os.environ["TESTS_WARM_DIRECTORY"])


def _connect(imports: str, seed: str) -> socket.socket:
    """A connection for one command to a server, which is started if there is none."""
    _keep_alive(imports, seed)
    return _reached(_directory() / f"{imports}{seed}")


@functools.cache
def _keep_alive(imports: str, seed: str) -> socket.socket:
    """A connection that says that this process may have more commands; the server ends when it has none of these."""
    path = _directory() / f"{imports}{seed}"
    with FileLock(f"{path}.lock"):
        try:
            connection = _reached(path)
        except OSError:
            _start_server(imports, seed, path)
            connection = _reached(path)
        connection.sendall(b"\0\0\0\0")
        assert _line(connection) == "ready"
    return connection


def _reached(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _start_server(imports: str, seed: str, path: Path) -> None:
    environment = {
        **{name: value for name, value in _server_environment().items() if not name.startswith(("PYTEST", "COV"))},
        "VERL_LOGGING_LEVEL": "WARN",
        "PYTHONHASHSEED": seed,
        "PYTHONPATH": str(ROOT),
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator would start a thread
        "WARM_ROOM": "x" * ENVIRONMENT_ROOM,
    }
    path.unlink(missing_ok=True)
    with open(f"{path}.log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm_server", imports, str(path), "x" * ARGUMENT_ROOM],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    for call in on_server:
        call(process.pid)
    process.returncode = 0  # it outlives this process where another one still uses it
    deadline = time.monotonic() + START_S
    while not path.exists():
        ended, _ = os.waitpid(process.pid, os.WNOHANG)
        assert not ended, f"the warm server could not start:\n{Path(f'{path}.log').read_text()}"
        assert time.monotonic() < deadline, f"the warm server took more than {START_S} s to start"
        time.sleep(0.02)
