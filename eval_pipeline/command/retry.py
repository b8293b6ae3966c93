"""`retry`: re-queues failed and incomplete evaluations."""

from __future__ import annotations

import argparse
from contextlib import suppress

from eval_pipeline.command.arguments import add_action, add_directory
from verl_ext.cli import Commands
from verl_ext.console import print_line

TEXT = (
    "Re-queue every evaluation of a run that failed, or that has answers without a verdict. The next `watch` or `run` "
    "evaluates them again and keeps what was answered and judged."
)


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_action(commands, "retry", TEXT, run, examples=["checkpoints/rlvr_coding_model/sft_quickstart"])
    add_directory(parser, "directory of a run, or of an evaluation")


def run(arguments: argparse.Namespace) -> int:
    """Reset the jobs and name them."""
    from eval_pipeline.flow.place import find_place
    from eval_pipeline.ledger.ledger import Ledger
    from eval_pipeline.report.results import read_evaluation
    from verl_ext.errors import UserError

    place = find_place(arguments.directory)
    ledger = Ledger(place.root)
    incomplete: dict[tuple[str, str], int] = {}
    for label in dict.fromkeys(job.checkpoint for job in ledger.jobs() if job.state == "done"):
        with suppress(UserError):  # it is not published yet, which the next `watch` or `run` does
            published = read_evaluation(place.directory_of(label))
            incomplete |= {(label, name): num for name, num in published.incomplete.items()}
    due = ledger.retry(incomplete=incomplete)
    for job in due:
        first_line = (job.error or "").partition("\n")[0]
        reason = f"failed: {first_line}"
        if job.state == "done":
            reason = f"{incomplete[job.checkpoint, job.dataset]} answers without a verdict"
        print_line(f"Re-queued: {job.checkpoint} on {job.dataset} ({reason})")
    if not due:
        print_line("No evaluation has failed or is incomplete, so there is nothing to retry.")
    return 0
