"""`retry`: re-queues failed evaluations."""

from __future__ import annotations

import argparse

from eval_pipeline.command.arguments import add_action, add_directory
from verl_ext.command_line import Commands
from verl_ext.tell import tell

TEXT = "Re-queue every failed evaluation of a run. The next `watch` or `run` evaluates them again."


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_action(commands, "retry", TEXT, run, examples=["checkpoints/rlvr_coding_model/sft_quickstart"])
    add_directory(parser, "directory of a run, or of an evaluation")


def run(arguments: argparse.Namespace) -> int:
    """Reset the failed jobs and name them."""
    from eval_pipeline.flow.place import find_place
    from eval_pipeline.ledger.ledger import Ledger

    due = Ledger(find_place(arguments.directory).root).retry()
    for job in due:
        reason = (job.error or "").partition("\n")[0]
        tell(f"Re-queued: {job.checkpoint} on {job.dataset} (failed: {reason})")
    if not due:
        tell("No evaluation has failed, so there is nothing to retry.")
    return 0
