"""Chooses the best checkpoint from all published figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from eval_pipeline.flow.complete import settings_of
from eval_pipeline.flow.session import Session
from eval_pipeline.report.results import METRICS_FILE, EvaluatedModel, read_evaluation
from eval_pipeline.report.selection import (
    BestCheckpoint,
    SelectionResult,
    read_best_checkpoint,
    select_best,
    write_best_checkpoint,
)
from verl_ext.checkpoint.manifest import BEST
from verl_ext.console import warn
from verl_ext.errors import UserError


class Chooser:
    """Writes `best_checkpoint.json`.

    Args:
        session: of the place.
        leads: whether this session's recipe says how checkpoints are compared. If not, metric, mode and settings of the
            last choice are kept, where there was one: the next stage of training starts from that file.
    """

    def __init__(self, session: Session, leads: bool) -> None:
        self._session, self._leads = session, leads
        self._has_warned = False

    def choose(self) -> None:
        """Choose among the checkpoints that were evaluated alike.

        Raises:
            UserError: the file cannot be read or written.
        """
        place = self._session.place
        if place.run_dir is None or place.one_model:
            return
        evaluated, is_chosen = published_models(place.root), (place.run_dir / BEST).exists()
        if self._leads or not is_chosen:
            recipe, selection = self._session.recipe, self._session.recipe.selection
            names = recipe.tiers.tier1 if selection.dataset is None else [selection.dataset]
            settings = {name: settings_of(self._session, name) for name in names}
            choice = select_best(evaluated, settings, selection.metric, selection.mode, selection.dataset)
            why = "no checkpoint has results of the metric that the best one is chosen by"
        else:
            last = read_best_checkpoint(place.run_dir)
            choice = _choose_again(evaluated, last, place.run_dir)
            how = f"{last.metric} on {', '.join(last.datasets)}"
            why = f"the new results cannot be compared with those that global_step_{last.step} was chosen by ({how})"
        if choice is not None:
            write_best_checkpoint(place.run_dir, choice, evaluated)
            incomplete = [name for name in choice.datasets if name in choice.best.incomplete]
            if incomplete:
                on = ", ".join(incomplete)
                warn(f"{choice.best.label} is the best checkpoint by results that are incomplete on {on}")
        elif is_chosen and not self._has_warned:
            self._has_warned = True
            warn(f"{why}; {BEST} is unchanged")


def _choose_again(evaluated: Sequence[EvaluatedModel], last: BestCheckpoint, run_dir: Path) -> SelectionResult | None:
    """Choose by the rule of the last choice.

    Returns:
        The choice; None where the last one could not take part in it, or not on all of its data sets.
    """
    if not any(last.metric in result.metrics for model in evaluated for result in model.datasets.values()):
        return None
    choice = select_best(evaluated, last.settings, last.metric, last.mode)
    is_there = (run_dir / f"global_step_{last.step}").is_dir()
    if choice is None or (is_there and choice.values.get(last.step) is None):
        return None
    return choice if {*last.datasets} <= {*choice.datasets} else None


def published_models(root: Path) -> list[EvaluatedModel]:
    """Every model with published figures, by step; those that no run saved come last. What cannot be read is left out.

    Args:
        root: the run's `eval/`; checkpoints are looked for beside it, wherever they were evaluated.
    """
    models = []
    for path in root.glob(f"eval_*/{METRICS_FILE}"):
        try:
            model = read_evaluation(path.parent)
        except UserError as error:
            warn(str(error))
            continue
        is_of_run = model.step is not None
        models.append(replace(model, checkpoint=root.parent / model.checkpoint.name) if is_of_run else model)
    return sorted(models, key=lambda model: (model.step is None, model.step or 0, model.label))
