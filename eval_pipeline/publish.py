"""Publishes results once all jobs of a checkpoint have ended: files, the best checkpoint, the terminal, and W&B."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eval_pipeline.checkpoints import EvalDir, read_training_run
from eval_pipeline.jobs import Job
from eval_pipeline.report.report import format_table
from eval_pipeline.report.results import (
    METRICS_FILE,
    EvaluatedModel,
    encodable,
    published_models,
    read_evaluation,
    read_qa_logs,
    read_results,
    write_evaluation,
)
from eval_pipeline.report.selection import (
    BestCheckpoint,
    SelectionResult,
    read_best_checkpoint,
    select_best,
    write_best_checkpoint,
)
from eval_pipeline.run import EvalContext, Task
from verl_ext.checkpoint.manifest import BEST
from verl_ext.commands import program
from verl_ext.console import print_summary, typed_path, warn
from verl_ext.errors import UserError
from verl_ext.files import file_lock
from verl_ext.metrics.wandb_sink import fill_wandb_run, open_wandb_run, persistent_run_id

if TYPE_CHECKING:
    from wandb import Run, Table

PUBLISH_LOCK = "publish.lock"
TRACK_LOCK = "track.lock"


class Publisher:
    """Publishes results that have not been published, including those of a process that was killed before it could.

    Args:
        owns_selection: whether this configuration selects the best checkpoint, as in `watch`. Otherwise, the metric,
            mode and settings of the last selection are kept, if there was one: a side evaluation with other settings
            must not change where the next stage of training starts.
    """

    def __init__(self, context: EvalContext, owns_selection: bool) -> None:
        self._context, self._owns_selection = context, owns_selection
        self._published: dict[str, str] = {}  # digest by label
        self._has_warned = False
        self._warned_partial: set[str] = set()

    def publish(self, tasks: Sequence[Task]) -> set[str]:
        """Publish every checkpoint whose wanted jobs have ended, with the results of all its finished jobs.

        Returns:
            Labels of the published checkpoints.

        Raises:
            UserError: a file cannot be read or written.
        """
        unfinished = {task.checkpoint.label for task in self._context.unfinished(tasks)}
        for label in unfinished & self._published.keys():
            del self._published[label]  # re-queued; it may end with the same digest
        ended = dict.fromkeys(task.checkpoint.label for task in tasks if task.checkpoint.label not in unfinished)
        jobs: dict[str, list[Job]] = {}
        for job in self._context.jobs.jobs():
            jobs.setdefault(job.checkpoint, []).append(job)
        digests = {label: _digest(jobs[label]) for label in ended}
        changed = [label for label in ended if self._published.get(label) != digests[label]]
        return {label for label in changed if self._publish(label, digests[label])}

    def _publish(self, label: str, digest: str) -> bool:
        if self._context.jobs.is_wanted_by_others(label):
            return False  # the process that wants more publishes everything
        is_new = self._write_results(label)
        if not self._context.config.wandb or self._track(label):
            self._published[label] = digest
        return is_new

    def _write_results(self, label: str) -> bool:
        """Write the results of a checkpoint and select the best one; returns whether they were new."""
        jobs, directory = self._context.jobs, self._context.directory
        with file_lock(directory.root / PUBLISH_LOCK):
            of_checkpoint = [job for job in jobs.jobs() if job.checkpoint == label]
            digest, model = _digest(of_checkpoint), self._merge_results(label, of_checkpoint)
            if model is None or jobs.published(label)[0] == digest:
                return False  # every job failed, or another process has published the results
            results = directory.results_of(label)
            write_evaluation(results, model)
            self.update_best_checkpoint()
            queue = directory.root if directory.one_model else directory.run_dir or directory.root
            retry = f"{program('eval')} retry {shlex.quote(typed_path(queue))}"
            for name, num in model.incomplete.items():
                warn(
                    f"{label} on {name} is incomplete: {num} answers have no verdict (api_error) and count as wrong; "
                    f"fix the cause, run `{retry}`, and evaluate again"
                )
            print_summary(f"Evaluated: {label}", {"results": typed_path(results)}, table=format_table(model.datasets))
            jobs.mark_published(label, digest)
        return True

    def _merge_results(self, label: str, jobs: Sequence[Job]) -> EvaluatedModel | None:
        """Merge the results of a checkpoint's finished jobs with its current weights; None if there are none."""
        files = [self._context.directory.job_result(label, job.dataset) for job in jobs if job.state == "done"]
        models = [read_results(file, f"delete {self._context.jobs.path} to judge everything again") for file in files]
        models = [model for model in models if model.weights == self._context.weights_of(label)]
        datasets = {name: result for model in models for name, result in model.datasets.items()}
        return replace(models[0], datasets=datasets) if models else None

    def select_again(self) -> None:
        """Select the best checkpoint if `selection` has changed since the last time, even if no result is new.

        Raises:
            UserError: a file cannot be read or written.
        """
        config, directory = self._context.config, self._context.directory
        rule = self._context.selection_metric(), config.selection.mode, set(config.selected_on)
        with file_lock(directory.root / PUBLISH_LOCK):
            with suppress(UserError):  # missing or damaged
                last = read_best_checkpoint(directory.of_run)
                if (last.metric, last.mode, set(last.settings)) == rule:
                    return
            self.update_best_checkpoint()

    def update_best_checkpoint(self) -> None:
        """Select the best checkpoint of the run, and write `best_checkpoint.json`.

        Raises:
            UserError: the file cannot be read or written.
        """
        directory = self._context.directory
        if directory.run_dir is None or directory.one_model:
            return
        evaluated, exists = published_models(directory.root), (directory.run_dir / BEST).exists()
        if self._owns_selection or not exists:
            selection = self._context.config.selection
            settings = {name: self._context.compared_settings(name) for name in self._context.config.selected_on}
            metric = self._context.selection_metric()
            selected = select_best(evaluated, settings, metric, selection.mode, selection.dataset)
            why = "no checkpoint has results for the selection metric"
        else:
            last = read_best_checkpoint(directory.run_dir)
            selected = _select_by_last_rule(evaluated, last, directory.run_dir)
            how = f"{last.metric} on {', '.join(last.datasets)}"
            why = f"the new results cannot be compared with those that selected global_step_{last.step} ({how})"
        if selected is not None:
            write_best_checkpoint(directory.run_dir, selected, evaluated)
            self._warn_of_partial(selected)
            incomplete = [name for name in selected.datasets if name in selected.best.incomplete]
            if incomplete:
                on = ", ".join(incomplete)
                warn(f"{selected.best.label} is the best checkpoint, but its results are incomplete on {on}")
        elif exists and not self._has_warned:
            self._has_warned = True
            warn(f"{why}; {BEST} is unchanged")

    def _warn_of_partial(self, selected: SelectionResult) -> None:
        """Warn once about each checkpoint that was not compared, because it lacks results."""
        for label in selected.partial:
            if label not in self._warned_partial:
                self._warned_partial.add(label)
                on = ", ".join(selected.datasets)
                warn(f"{label} is not compared with other checkpoints, because it lacks results on some of {on}")

    def _track(self, label: str) -> bool:
        """Send published results to W&B, which may take minutes. Other processes neither wait nor send them again.

        Returns:
            Whether nothing is left to send; False while another process is sending, because it may fail.
        """
        jobs, directory = self._context.jobs, self._context.directory
        published, tracked = jobs.published(label)
        if not published or published == tracked:
            return True
        with file_lock(directory.root / TRACK_LOCK, wait=False) as is_mine:
            published, tracked = jobs.published(label)
            if is_mine and published and published != tracked:
                log_to_wandb(directory, read_evaluation(directory.results_of(label)))
                jobs.mark_tracked(label, published)
            return is_mine


def _select_by_last_rule(
    evaluated: Sequence[EvaluatedModel], last: BestCheckpoint, run_dir: Path
) -> SelectionResult | None:
    """Select by the rule of the last selection; None if its checkpoint or one of its datasets cannot be compared."""
    if not any(last.metric in result.metrics for model in evaluated for result in model.datasets.values()):
        return None
    selected = select_best(evaluated, last.settings, last.metric, last.mode)
    exists = (run_dir / f"global_step_{last.step}").is_dir()
    if selected is None or (exists and selected.values.get(last.step) is None):
        return None
    return selected if {*last.datasets} <= {*selected.datasets} else None


def _digest(jobs: Sequence[Job]) -> str:
    content = sorted((job.dataset, job.digest, job.state) for job in jobs if job.has_ended)
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def log_to_wandb(directory: EvalDir, model: EvaluatedModel) -> None:
    """Log a checkpoint's results, always to the same W&B run, even if results on more datasets are added later.

    The run `phase1_eval_<label>` is in the training run's project and group. If W&B cannot be used, warn and continue.

    Raises:
        UserError: a question-and-answer log cannot be read.
    """
    try:
        if directory.run_dir is not None and not directory.one_model:
            run_id = f"{persistent_run_id(directory.run_dir)}-{model.label}"
        else:  # results that are kept apart from the run's
            key = f"{directory.root} {model.label} {model.weights}"
            run_id = hashlib.sha256(key.encode()).hexdigest()[:16]
    except OSError as error:
        warn(f"the results of {model.label} are not logged to W&B, because the run's id cannot be saved: {error}")
        return
    training, results = read_training_run(directory.run_dir), directory.results_of(model.label)
    qa_rows = read_qa_logs(results, model.datasets)
    run = open_wandb_run(
        project=training.project,
        name=f"phase1_eval_{model.label}",
        directory=directory.run_dir or results,
        config={key: value for key, value in model.to_json().items() if key != "datasets"},
        run_id=run_id,
        group=training.experiment,
        job_type="eval",
        proxy=training.wandb_proxy,
    )
    fill_wandb_run(run, lambda run: _log(run, model, qa_rows), results_in=METRICS_FILE)


def _log(run: Run, model: EvaluatedModel, qa_rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Log metrics as `eval/<dataset>/<metric>`, their intervals as `<metric>_low` and `<metric>_high`, and tables."""
    row: dict[str, Any] = {}
    for dataset, result in model.datasets.items():
        row |= {f"eval/{dataset}/{name}": value for name, value in result.metrics.items() if value is not None}
        for name, (low, high) in result.intervals.items():
            row |= {f"eval/{dataset}/{name}_low": low, f"eval/{dataset}/{name}_high": high}
    row |= {f"eval/{dataset}/qa": _table(rows) for dataset, rows in qa_rows.items() if rows}
    # `global_step` is the axis of every chart, as in training; a model without a step has no value on that axis
    run.log(row if model.step is None else {**row, "global_step": model.step})
    run.summary["step"] = model.step


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    import wandb

    columns = list(rows[0])
    data = [[encodable(row[name]) for name in columns] for row in rows]
    return wandb.Table(columns=[*columns], data=data)
