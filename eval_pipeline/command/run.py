"""`run`: evaluates one checkpoint now."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eval_pipeline.command.arguments import add_action, add_recipe
from eval_pipeline.command.paths import input_path, output_path
from verl_ext.cli import FAILURES, Commands, IntArg
from verl_ext.console import print_line
from verl_ext.paths import caller_directory

if TYPE_CHECKING:
    from eval_pipeline.config import EvalConfig
    from eval_pipeline.models.checkpoint import Checkpoint

TEXT = "Evaluate one checkpoint, or any Hugging Face model. Answers from an interrupted run are reused."
EXAMPLES = (
    "--checkpoint checkpoints/rlvr_coding_model/sft_quickstart/global_step_750",
    "--checkpoint models/mine --recipe humaneval sampling.max_tokens=512",
    "--output results --recipe gsm8k engine.kind=openai engine.base_url=http://localhost:8000/v1",
)
NOTES = """\
The results of a run's checkpoint go to <run>/eval/eval_step_N/, those of another model to eval_<name> next to it.
With --limit or --problems they go to <run>/eval/trial_step_N/ and do not affect the choice of the best checkpoint."""
EXIT_CODES = {"0": "done", "1": "an evaluation failed", **FAILURES}


def register(commands: Commands) -> None:
    """Add the command."""
    parser = add_action(commands, "run", TEXT, run, examples=EXAMPLES, notes=NOTES, exit_codes=EXIT_CODES)
    parser.add_argument("--checkpoint", type=input_path, metavar="DIR", help="global_step_N or a model directory")
    parser.add_argument("--tier", type=int, choices=(1, 2, 3), default=1, help="last tier of data sets to evaluate")
    parser.add_argument(
        "--problems",
        type=input_path,
        metavar="FILE",
        help="use this file, in the quickstart's format, instead of the recipe's data sets",
    )
    parser.add_argument("--limit", type=IntArg(), help="at most N problems per data set, sampled across it")
    parser.add_argument("--output", type=output_path, metavar="DIR", help="output directory (default: see below)")
    add_recipe(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate; returns 1 when a data set failed."""
    from eval_pipeline.flow.evaluate import evaluate_now
    from eval_pipeline.flow.place import place_of_checkpoint
    from eval_pipeline.flow.session import Session
    from eval_pipeline.models.checkpoint import find_checkpoint
    from eval_pipeline.recipe.choose import choose_recipe

    given = None if arguments.checkpoint is None else find_checkpoint(arguments.checkpoint)
    recipe = choose_recipe(arguments, None if given is None else given.run_dir)
    checkpoint, recipe = _on_server(given, recipe) if recipe.engine.kind == "openai" else (_named(given), recipe)
    if arguments.problems is not None:
        recipe = _only(arguments.problems, recipe)
    if arguments.limit is not None:
        recipe = _sampled(recipe, arguments.limit)
    is_trial = arguments.problems is not None or arguments.limit is not None
    session = Session(place_of_checkpoint(checkpoint, arguments.output, is_trial), recipe)
    return evaluate_now(session, checkpoint, arguments.tier)


def _named(checkpoint: Checkpoint | None) -> Checkpoint:
    from verl_ext.errors import UserError

    if checkpoint is None:
        raise UserError(
            "no model is named; give --checkpoint DIR, or set engine.kind=openai to evaluate a server's model"
        )
    return checkpoint


def _on_server(checkpoint: Checkpoint | None, recipe: EvalConfig) -> tuple[Checkpoint, EvalConfig]:
    """The model that the server has, and the recipe that names it: no other is asked, should the server change."""
    from eval_pipeline.engines.openai_server import ask_for_card
    from eval_pipeline.models.checkpoint import served_model

    card = ask_for_card(recipe.engine, None if checkpoint is None else checkpoint.export)
    model = checkpoint or served_model(card, caller_directory())
    return model, replace(recipe, engine=replace(recipe.engine, model=card.id))


def _sampled(recipe: EvalConfig, size: int) -> EvalConfig:
    """The recipe with a sample of each of its data sets, which the user is told about."""
    from eval_pipeline.problems.datasets import SAMPLE_SEED

    print_line(
        f"--limit {size}: at most {size} problems of each data set, sampled across its file with seed {SAMPLE_SEED}; "
        "every checkpoint and every run is asked the same ones",
        sys.stderr,
    )
    return replace(recipe, datasets={name: {**entry, "sample": size} for name, entry in recipe.datasets.items()})


def _only(problems: Path, recipe: EvalConfig) -> EvalConfig:
    """The recipe with this file in the place of its data sets."""
    from eval_pipeline.config import TiersConfig

    name = problems.resolve().parent.name or problems.stem
    datasets = {name: {"format": "quickstart", "path": str(problems.absolute())}}
    selection = replace(recipe.selection, dataset=None)
    return replace(recipe, datasets=datasets, tiers=TiersConfig(tier1=[name]), selection=selection)
