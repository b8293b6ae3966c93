"""`retry`: makes failed evaluations due again."""

from __future__ import annotations

import argparse

from eval_pipeline.command.arguments import add_action, add_directory
from verl_ext.command_line import Commands
from verl_ext.tell import tell

TEXT = "Make every failed evaluation of a run due again. A `watch` or `run` then takes it up."


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
        tell(f"{job.checkpoint} on {job.dataset} is due again (it had failed: {reason})")
    if not due:
        tell("Nothing has failed, so there is nothing to do again.")
    return 0
