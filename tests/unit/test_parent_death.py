"""`end_with_parent` ends a process with its parent."""

from __future__ import annotations

import subprocess
import sys

import psutil

from tests.helpers.processes import wait_gone

CHILD = """
import time
from verl_ext.parent_death import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
PARENT = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
print(child.pid, flush=True)
child.wait()
"""


def test_a_child_does_not_outlive_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "ready\n" and child.is_running()
    parent.kill()
    parent.wait()
    wait_gone([child])
