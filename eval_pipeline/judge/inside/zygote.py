"""A process with an initialized Python that forks for each piece of work.

It only passes open files on and does not read them, so its forks inherit no answer and no test. It is started as
`python zygote.py OPTIONS`, where OPTIONS is a JSON object, with its control socket as standard input.
"""

from __future__ import annotations

import _thread
import gc
import importlib
import importlib.machinery
import importlib.util
import json
import marshal
import os
import random
import resource
import select
import signal
import site
import socket
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import kernel
import protocol
import seccomp
import tester
from rpc import AnswerPeer, ConversationError

_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Initialize, report readiness, then fork for each request until the server closes the connection."""
    options = json.loads(sys.argv[1])
    is_for_answers = options["role"] == "answer"
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    for name in protocol.PRELOADED[options["role"]]:
        importlib.import_module(name)
    site.setquit()  # `exit` and `quit`, which -S omits along with the folders of packages
    work = tester.work
    policy_for = None
    if is_for_answers:
        import confinement  # not at the top: testers load neither
        import supervisor

        work = supervisor.work
        if options["sandlock"]:
            policy_for = confinement.landlock_policy(options["sandlock"], options["package_paths"])
    # so that imports in an answer do not find the files of this folder
    sys.path.pop(0)
    _allow_packages(options["modules"])
    if options["drop_user"] and not options["single_use"]:
        kernel.become_nobody()
        # reset by the change of user, but needed to write the maps of a user namespace
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    if not options["own_namespaces"]:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # if an answer kills its supervisor, its processes become children of this one, where the server finds them
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    fork = os.fork
    if options["own_namespaces"] and is_for_answers and not options["single_use"]:
        fork = kernel.PidNamespaceForker().fork
    kernel.limit_arenas()
    if is_for_answers:
        confinement.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for, and do not become zombies
    seccomp.SUPERVISOR_FILTER.install()
    _warm_up()
    gc.collect()
    gc.freeze()
    control.sendall(b"R")
    _serve(control, fork, lambda fds: work(fds, options, policy_for), options["single_use"])


def _serve(control: socket.socket, fork: Callable[[], int], work: Callable[[list[int]], None], once: bool) -> None:
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not fds:
            os._exit(0)
        if once or fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(fds)
            os._exit(0)
        for fd in fds:
            os.close(fd)


# Installed packages that answers and tests may import


class PackageFinder:
    """Finds the listed modules, and nothing else in the folder where they are installed."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Called by the import system if the standard library has no module of this name."""
        return importlib.util.spec_from_file_location(name, self._files[name]) if name in self._files else None


def _allow_packages(files: dict[str, str]) -> None:
    """Allow imports of these modules from now on, here and in forks."""
    for name in _ONE_THREAD:
        os.putenv(name, "1")  # libraries read it when they are loaded; `os.environ` stays empty
    sys.meta_path.append(PackageFinder(files))


# Warm-up: do once what every fork will do. Python fills caches as it runs, in memory that a fork must copy before
# writing. Caches that are filled beforehand are shared, which saves about a seventh of the CPU time of a run.

_ROUNDS = 20
"""Python specializes the code of a function after a few calls."""
_ANSWER = """
from typing import List
def f(x: List[int]) -> List[int]:
    result = []
    for number in x:
        result.append(number * 2)
    return sorted(result)
"""
_TEST = """
def check(candidate):
    assert candidate([1, 2, 3]) == [2, 4, 6]
check(f)
"""
_COMPILED = marshal.dumps((compile("import math\n", "<preamble>", "exec"), compile(_TEST, "<test>", "exec")))


def _warm_up() -> None:
    """Run a known test against a known answer in this process."""
    for _ in range(_ROUNDS):
        module = types.ModuleType("answer")
        exec(compile(_ANSWER, "<answer>", "exec", dont_inherit=True), module.__dict__)
        ours, theirs = socket.socketpair()
        _thread.start_new_thread(_serve_answer, (theirs, module))
        tester.run_test({"entry_point": "f", "test": _TEST}, _COMPILED, tester.TesterPeer(ours))
        ours.close()
        _exchange_messages()
    while _thread._count() > 0:
        time.sleep(0.001)  # a fork takes only the thread that forks


def _serve_answer(connection: socket.socket, module: types.ModuleType) -> None:
    try:
        AnswerPeer(connection, module.__dict__).serve()
    except ConversationError:
        connection.close()


def _exchange_messages() -> None:
    """Do what a supervisor does, as far as possible here."""
    ours, theirs = socket.socketpair()
    null = os.open(os.devnull, os.O_RDONLY)
    protocol.send(ours, {"op": "run", "kind": "function", "limits": {"cpu_s": 1.5}}, b"x", (null,))
    poll = select.poll()
    poll.register(theirs.fileno(), select.POLLIN)
    poll.poll(1000)
    received = protocol.receive(theirs, max_fds=1)
    for fd in (null, *(received or (None, None, []))[2]):
        os.close(fd)
    random.seed(0)
    resource.getrusage(resource.RUSAGE_CHILDREN)
    ours.close()
    theirs.close()


main()
