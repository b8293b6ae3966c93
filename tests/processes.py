"""Processes seen from outside: any of them may end between two questions, and one that has gone has nothing."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from typing import Any

import psutil


def family_of(process: psutil.Process | subprocess.Popen[Any]) -> list[psutil.Process]:
    """Every process below this one."""
    return children_of(process, recursive=True)


def children_of(process: psutil.Process | subprocess.Popen[Any], *, recursive: bool = False) -> list[psutil.Process]:
    """The processes that this one started, and with `recursive` all that those started."""
    try:
        return psutil.Process(process.pid).children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def words_of(process: psutil.Process) -> list[str]:
    """Its command line."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def rank_of(process: psutil.Process) -> int | None:
    """Its number under torchrun, if it is a rank."""
    try:
        rank = process.environ().get("RANK")
    except psutil.NoSuchProcess:
        return None
    return None if rank is None else int(rank)


def ranks_of(launcher: int) -> dict[int, psutil.Process]:
    """The ranks that a launcher has started."""
    numbered = {rank_of(process): process for process in psutil.Process(launcher).children()}
    return {rank: process for rank, process in numbered.items() if rank is not None}


def alive(processes: Iterable[psutil.Process]) -> list[str]:
    """Those that have not ended; a zombie that init has not fetched yet has."""
    found = []
    for process in processes:
        try:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join([str(process.pid), *process.cmdline()])[:200])
        except psutil.NoSuchProcess:
            continue
    return found
