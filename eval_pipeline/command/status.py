"""`status`: what the ledger says."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from eval_pipeline.command.arguments import add_action, add_directory
from verl_ext.cli import FAILURES, Commands
from verl_ext.console import aligned_rows, print_line

if TYPE_CHECKING:
    from eval_pipeline.ledger.job import Job

TEXT = "Show every evaluation of a run. Prints its state, attempts, worker, duration, and the error if it failed."
EXIT_CODES = {"0": "no evaluation has failed", "1": "an evaluation has failed", **FAILURES}


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_action(
        commands, "status", TEXT, run, examples=["checkpoints/rlvr_coding_model/sft_quickstart"], exit_codes=EXIT_CODES
    )
    add_directory(parser, "directory of a run, or of an evaluation")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with all times")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each job; returns 1 when one has failed."""
    from eval_pipeline.flow.place import find_place
    from eval_pipeline.ledger.ledger import Ledger

    jobs = Ledger(find_place(arguments.directory).root).jobs()
    if arguments.json:
        for job in jobs:
            print_line(json.dumps(asdict(job)))
    else:
        _print_table(jobs)
    return int(any(job.state == "failed" for job in jobs))


def _print_table(jobs: Sequence[Job]) -> None:
    header = ("checkpoint", "data set", "tier", "state", "attempts", "seconds", "worker")
    lines = aligned_rows([header, *(_cells(job) for job in jobs)])
    for line, job in zip(lines, [None, *jobs], strict=True):
        print_line(line)
        if job is not None and job.error is not None:
            print_line(f"    {_when(job)}{job.error}")


def _cells(job: Job) -> tuple[str, ...]:
    seconds = f"{job.seconds['active_s']:.0f}" if "active_s" in job.seconds else "-"
    tier, attempts = str(job.tier), str(job.attempts)
    return job.checkpoint, job.dataset, tier, job.state, attempts, seconds, job.worker or "-"


def _when(job: Job) -> str:
    wait = job.not_before - time.time()
    return f"next attempt in {wait:.0f} s; " if job.state == "pending" and wait > 0 else ""
