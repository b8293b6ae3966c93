"""`watch`: evaluates a run's checkpoints as they come."""

from __future__ import annotations

import argparse

from eval_pipeline.command.arguments import RECIPE_EXAMPLE, add_action, add_directory, add_recipe
from verl_ext.cli import FAILURES, Commands

TEXT = (
    "Evaluate every checkpoint of a run as it appears, and choose the best. Ends when the run has finished and every "
    "checkpoint is evaluated. After a kill, the same command resumes. Several watchers of one run share the work."
)
EXIT_CODES = {
    "0": "the run has finished and its checkpoints are evaluated",
    "1": "an evaluation failed, or there was no checkpoint to evaluate",
    **FAILURES,
}


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_action(
        commands,
        "watch",
        TEXT,
        run,
        examples=["checkpoints/rlvr_coding_model/sft_quickstart"],
        notes=RECIPE_EXAMPLE,
        exit_codes=EXIT_CODES,
    )
    add_directory(parser, "directory of the training run; it may still be empty")
    add_recipe(parser)


def run(arguments: argparse.Namespace) -> int:
    """Watch; returns 1 when a data set failed, or no checkpoint could be evaluated."""
    from eval_pipeline.flow.place import place_of_run
    from eval_pipeline.flow.session import Session
    from eval_pipeline.flow.watch import watch
    from eval_pipeline.recipe.choose import choose_recipe

    place = place_of_run(arguments.directory)
    recipe = choose_recipe(arguments, place.run_dir)
    recipe.engine.require_own_model("watch")
    return watch(Session(place, recipe), arguments.recipe)
