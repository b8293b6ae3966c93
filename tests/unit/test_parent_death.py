"""A process ends with its parent, and a rank with its launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import psutil

from tests.helpers.processes import wait_gone
from verl_ext.processes import LAUNCHER_PID

CHILD = """
import time
from verl_ext.processes import end_with_parent
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


def test_child_does_not_outlive_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert parent.stdout.readline() == "ready\n" and child.is_running()
    parent.kill()
    parent.wait()
    wait_gone([child])


def test_rank_exits_if_launcher_died_during_its_start() -> None:
    """By then it has another parent; it must neither read the configuration nor wait for other ranks."""
    environment = {**os.environ, LAUNCHER_PID: str(os.getpid() + 1)}
    command = [sys.executable, "-m", "verl_ext.trainer", "missing.yaml"]
    rank = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (rank.returncode, rank.stdout, rank.stderr) == (1, "", "")


def test_rank_reports_unreadable_configuration_in_one_sentence() -> None:
    environment = {**os.environ, LAUNCHER_PID: str(os.getpid())}
    command = [sys.executable, "-m", "verl_ext.trainer", "missing.yaml"]
    rank = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert rank.returncode == 2
    assert re.fullmatch(r"error: missing\.yaml cannot be read .*\n", rank.stderr)
