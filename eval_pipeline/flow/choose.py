"""Chooses the best checkpoint from all published figures of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from eval_pipeline.figures.best_file import read_best_checkpoint, write_best_checkpoint
from eval_pipeline.figures.evaluated import EvaluatedModel
from eval_pipeline.figures.files import METRICS_FILE, read_evaluation
from eval_pipeline.figures.selection import choose_best
from eval_pipeline.flow.complete import settings_of
from eval_pipeline.flow.session import Session
from verl_ext.checkpoint.layout import BEST
from verl_ext.errors import UserError
from verl_ext.metrics.notice import warn


class Chooser:
    """Writes `best_checkpoint.json`.

    Args:
        session: of the place.
        leads: whether this session's settings are those that checkpoints are compared under; else those of the last
            choice are, where there was one.
    """

    def __init__(self, session: Session, leads: bool) -> None:
        self._session, self._leads = session, leads
        self._has_warned = False

    def choose(self) -> None:
        """Choose among the checkpoints that were evaluated alike.

        Raises:
            UserError: the file cannot be read or written.
        """
        place, selection = self._session.place, self._session.recipe.selection
        if place.run_dir is None or place.one_model:
            return
        evaluated, settings = published_models(place.root), self._settings(place.run_dir)
        choice = choose_best(evaluated, settings, selection.metric, selection.mode, selection.dataset)
        if choice is not None:
            write_best_checkpoint(place.run_dir, choice, evaluated)
            incomplete = [name for name in choice.datasets if name in choice.best.incomplete]
            if incomplete:
                on = ", ".join(incomplete)
                warn(f"{choice.best.label} is the best checkpoint by results that are incomplete on {on}")
        elif (place.run_dir / BEST).exists() and not self._has_warned:
            self._has_warned = True
            warn(f"no checkpoint has results of the metric that the best one is chosen by; {BEST} is unchanged")

    def _settings(self, run_dir: Path) -> dict[str, Any]:
        if not self._leads and (run_dir / BEST).exists():
            return read_best_checkpoint(run_dir).settings
        selection = self._session.recipe.selection
        names = self._session.recipe.tiers[1] if selection.dataset is None else (selection.dataset,)
        return {name: settings_of(self._session, name) for name in names}


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
