"""What is written when the last verdict of a job is in."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eval_pipeline.flow.session import Session
from eval_pipeline.judge.packages import versions_of
from eval_pipeline.report.metrics import rate_intervals, summarize
from eval_pipeline.report.results import DatasetResult, EvaluatedModel, write_json, write_qa_log, write_verdicts
from eval_pipeline.work.evaluation import Evaluation


def write_result(session: Session, evaluation: Evaluation) -> None:
    """Sum up a job: its verdicts, a sample for people to read, and the figures that `metrics.json` will hold.

    Args:
        session: of the place.
        evaluation: with a verdict for every answer.

    Raises:
        UserError: a file cannot be written.
    """
    job, checkpoint = evaluation.job, evaluation.checkpoint
    judged, seconds = evaluation.judged(), evaluation.seconds
    directory = session.place.directory_of(job.checkpoint)
    write_verdicts(directory, job.dataset, judged)
    write_qa_log(directory, job.dataset, judged, session.recipe.qa_per_error_type)
    result = DatasetResult(
        metrics=summarize(judged, elapsed_s=seconds["active_s"]),
        intervals=rate_intervals(judged),
        tier=job.tier,
        protocol=_protocol(session, evaluation),
        isolation=evaluation.isolation,
        seconds=seconds,
    )
    model = EvaluatedModel(
        label=checkpoint.label,
        step=checkpoint.step,
        checkpoint=checkpoint.path,
        export=str(checkpoint.export or session.recipe.engine.model or checkpoint.label),
        weights=session.weights_of(job.checkpoint),
        datasets={job.dataset: result},
    )
    write_json(session.place.result_of(job.checkpoint, job.dataset), model.to_json())


def _protocol(session: Session, evaluation: Evaluation) -> dict[str, Any]:
    recipe = session.recipe
    source = asdict(recipe.sources[evaluation.job.dataset])
    if source["sample"] is None:
        del source["sample"]  # or a report would find it missing in evaluations that are older than the field
    return {
        **evaluation.protocol,
        **settings_of(session, evaluation.job.dataset),
        "batch_size": recipe.batch_size,
        "source": source,
    }


def settings_of(session: Session, dataset: str) -> dict[str, Any]:
    """The part of the protocol that is compared where figures are: what is asked, how, and the limits."""
    recipe = session.recipe
    return {
        "sampling": asdict(recipe.sampling),
        "limits": asdict(recipe.judge.limits),
        "packages": versions_of(recipe.judge.packages),
        "problems_digest": session.digest_of_problems(dataset),
    }
