"""`report`: the base model against the best checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from eval_pipeline.command.arguments import add_action, add_directory, add_recipe
from eval_pipeline.command.paths import input_path
from verl_ext.cli import FAILURES, Commands
from verl_ext.console import print_summary, typed_path

if TYPE_CHECKING:
    from eval_pipeline.flow.session import Session

TEXT = (
    "Compare the base model of a training run with its best checkpoint. The base model is evaluated first, on the same "
    "data sets, unless it has been evaluated already."
)
NOTES = "Writes comparison_table.md, comparison_data.json and plots to <run>/eval/report/."
EXIT_CODES = {"0": "done", "1": "the evaluation of the base model failed", **FAILURES}


def register(commands: Commands) -> None:
    """Add the command."""
    example = "checkpoints/rlvr_coding_model/sft_quickstart --baseline data/quickstart/model"
    parser = add_action(commands, "report", TEXT, run, examples=[example], notes=NOTES, exit_codes=EXIT_CODES)
    add_directory(parser, "directory of an evaluated training run")
    parser.add_argument(
        "--baseline", type=input_path, required=True, metavar="MODEL", help="directory of the base model"
    )
    add_recipe(parser)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate the base model where that is not done, and write the report."""
    from eval_pipeline.config import TIERS
    from eval_pipeline.flow.evaluate import evaluate_now
    from eval_pipeline.flow.place import place_of_run
    from eval_pipeline.flow.session import Session
    from eval_pipeline.models.checkpoint import base_model
    from eval_pipeline.recipe.choose import choose_recipe, restricted_to
    from eval_pipeline.report.results import read_evaluation
    from eval_pipeline.report.selection import read_best_checkpoint

    place = place_of_run(arguments.directory)
    recipe = choose_recipe(arguments, place.of_run)
    recipe.engine.require_own_model("report")
    step = read_best_checkpoint(place.of_run).step
    best = read_evaluation(place.directory_of(f"step_{step}"))
    baseline = base_model(arguments.baseline)
    session = Session(place, restricted_to(best.datasets, recipe))
    code = evaluate_now(session, baseline, max(TIERS))
    if code == 0:
        table = _write(session, baseline.label, best.label)
        rows = {"report": typed_path(table), "plots": typed_path(table.parent / "*.png")}
        print_summary(f"Finished: report on {place.of_run.name}", rows)
    return code


def _write(session: Session, base_label: str, best_label: str) -> Path:
    from eval_pipeline.flow.choose import published_models
    from eval_pipeline.report.report import write_report
    from eval_pipeline.report.results import read_evaluation, read_outcomes
    from eval_pipeline.report.selection import read_best_checkpoint
    from verl_ext.metrics.jsonl import METRICS_FILE, iter_metrics

    place = session.place
    base, best = (place.directory_of(label) for label in (base_label, best_label))
    history = place.of_run / METRICS_FILE
    return write_report(
        place.root / "report",
        baseline=read_evaluation(base),
        best=read_evaluation(best),
        history=[model for model in published_models(place.root) if model.step is not None],
        training_history=iter_metrics(history) if history.is_file() else (),
        outcomes=(read_outcomes(base), read_outcomes(best)),
        chosen_by=read_best_checkpoint(place.of_run),
    )
