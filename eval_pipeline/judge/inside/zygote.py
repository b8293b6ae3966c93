"""A process that has Python ready and forks for each piece of work that it is handed.

It reads nothing but the open files that it hands on, so that what it forks inherits no answer and no test. Started as
`python zygote.py OPTIONS`, a JSON object, with its control socket as standard input.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import site
import socket
import sys
from collections.abc import Callable

import imports
import kernel
import namespaces
import preloaded
import rehearsal
import seccomp

# the modules that say what a fork does; each only where it is needed
_WORK = {"answer": "supervise", "tester": "tester"}


def main() -> None:
    """Get ready, say so, then fork at each request until the server closes the connection."""
    options = json.loads(sys.argv[1])
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    for name in preloaded.MODULES[options["role"]]:
        importlib.import_module(name)
    work = importlib.import_module(_WORK[options["role"]]).work
    site.setquit()  # `exit` and `quit`, which -S leaves out with the folders of packages
    policy_for = None
    if options["sandlock"]:
        import landlock

        policy_for = landlock.policy_maker(options["sandlock"], options["package_paths"])
    # an import in an answer must not find the files of this folder
    sys.path.pop(0)
    imports.allow(options["modules"])
    if options["drop_user"] and not options["single_use"]:
        kernel.become_nobody()
        # lost with the change of user; without it the maps of a user namespace cannot be written
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    if not options["own_namespaces"]:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # what an answer leaves that has killed its supervisor stays below this process, where the server finds it
        kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    fork = os.fork
    if options["own_namespaces"] and options["role"] == "answer" and not options["single_use"]:
        fork = namespaces.Nursery().fork
    kernel.limit_arenas()
    if options["role"] == "answer":
        importlib.import_module("binding").prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children, and none becomes a zombie
    seccomp.OF_SUPERVISORS.install()
    rehearsal.rehearse()
    gc.collect()
    gc.freeze()
    control.sendall(b"R")
    _serve(control, fork, lambda fds: work(fds, options, policy_for), options["single_use"])


def _serve(
    control: socket.socket, fork: Callable[[], int], work: Callable[[list[int]], None], single_use: bool
) -> None:
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 2)
        if not fds:
            os._exit(0)
        if single_use or fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            work(fds)
            os._exit(0)
        for fd in fds:
            os.close(fd)


main()
