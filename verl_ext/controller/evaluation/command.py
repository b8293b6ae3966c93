"""`eval_pipeline adaptive`: compares a budget controller with its baselines."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from eval_pipeline.commands import add_action, input_path, output_path
from verl_ext.cli import Commands, FloatArg, IntArg
from verl_ext.data.config import VQA_METRICS
from verl_ext.errors import UserError
from verl_ext.paths import caller_directory

if TYPE_CHECKING:
    from verl_ext.controller.source import ControllerSource

TEXT = (
    "Compare a budget controller with baselines on the same questions, by latency. The baselines are the full model, "
    "static configurations, a lookup table of static configurations by budget, random configurations, and an oracle."
)
EXAMPLES = (
    "--checkpoint checkpoints/rlvr_coding_model/controller_quickstart",
    "--checkpoint controller --vlm models/molmoe --questions data/textvqa --num-budgets 4",
)
NOTES = """\
Run it on an idle machine. It writes adaptive.json, adaptive.md, adaptive.npz, pareto.png and
curves.png to <run>/eval/adaptive_step_N/, or to adaptive/ for an export that belongs to no run."""


def add_adaptive(commands: Commands) -> None:
    """Add the command `adaptive`."""
    parser = add_action(commands, "adaptive", TEXT, run, examples=EXAMPLES, notes=NOTES)
    parser.set_defaults(typed_again="starts over")
    parser.add_argument(
        "--checkpoint",
        type=input_path,
        metavar="DIR",
        required=True,
        help="a controller's export, global_step_N, or run directory (its newest complete checkpoint is used)",
    )
    budgets = parser.add_mutually_exclusive_group()
    budgets.add_argument(
        "--budgets", type=FloatArg(), nargs="+", default=[], metavar="MS", help="latency budgets, milliseconds"
    )
    add_number(budgets, "--num-budgets", 8, "number of budgets, evenly spaced over the controller's range")
    parser.add_argument(
        "--questions", type=input_path, metavar="FOLDER", help="folder of train*.parquet and val*.parquet"
    )
    parser.add_argument(
        "--metric",
        choices=VQA_METRICS,
        help="metric of the answers to --questions (default: that of the run's datasets if they share one, else vqa)",
    )
    parser.add_argument(
        "--images",
        type=input_path,
        metavar="FOLDER",
        help="folder of the images that --questions name by path (default: the folder of --questions)",
    )
    add_number(parser, "--num-samples", 200, "number of val questions for the comparison")
    add_number(parser, "--num-train", 100, "number of train questions for the lookup table")
    add_number(parser, "--max-static", 36, "maximum size of the grid of static configurations")
    parser.add_argument(
        "--search-questions",
        type=IntArg(0),
        default=48,
        help="number of --num-train questions to choose the blocks of static configurations with; 0 keeps the most "
        "important blocks according to the run's importance file, or the first blocks without one",
    )
    add_number(parser, "--repeats", 1, "runs of each configuration; the median is used")
    parser.add_argument("--seed", type=IntArg(0), default=0, help="seed of the random configurations")
    parser.add_argument(
        "--latency",
        choices=("measured", "model"),
        default="measured",
        help="measure latencies, or compute them with the run's latency model, which is reproducible",
    )
    parser.add_argument("--vlm", metavar="PATH", help="the vision-language model (default: its path in training)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code of the model (Molmo needs it)")
    parser.add_argument("--adapter", metavar="PATH_OR_MODULE:CLASS", help="your adapter, if training used one")
    parser.add_argument("--output", type=output_path, metavar="DIR", help="output directory (default: see below)")
    parser.add_argument("--no-wandb", action="store_true", help="do not log to W&B")


def add_number(parser: argparse._ActionsContainer, name: str, default: int, text: str) -> None:
    """Add an argument that is an integer of at least 1."""
    parser.add_argument(name, type=IntArg(), default=default, help=text)


def run(arguments: argparse.Namespace) -> int:
    """Run the comparison."""
    from verl_ext.controller.source import find_controller
    from verl_ext.plugins import Plugin

    for option in ("metric", "images"):
        if arguments.questions is None and getattr(arguments, option) is not None:
            raise UserError(f"--{option} has no effect without --questions; set both, or omit it")
    source = find_controller(arguments.checkpoint)
    from verl_ext.controller.evaluation.evaluate import AdaptiveEvalConfig, evaluate  # here, as torch takes seconds

    options = {each.name: getattr(arguments, each.name) for each in fields(AdaptiveEvalConfig)}
    if arguments.adapter is not None:
        options["adapter"] = Plugin.parse(arguments.adapter, "--adapter")
    config = AdaptiveEvalConfig(**options)
    evaluate(source, config, arguments.output or default_output(source), not arguments.no_wandb)
    return 0


def default_output(source: ControllerSource) -> Path:
    """The output directory: inside the run, or in the caller's directory for an export without a run."""
    from eval_pipeline.checkpoints import EVAL_FOLDER

    parent = caller_directory() if source.run_dir is None else source.run_dir / EVAL_FOLDER
    return parent / source.label
