"""Results of an evaluated model and their files: metrics.json, summary.json, verdicts, answers and samples of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eval_pipeline.judge import ERROR_TYPES, ErrorType
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.report.metrics import Intervals, JudgedAnswer, Metrics
from verl_ext.console import warn
from verl_ext.errors import UserError
from verl_ext.files import parse_json, replace_file

METRICS_FILE = "metrics.json"
SUMMARY_FILE = "summary.json"
VERDICTS_FOLDER = "verdicts"
ANSWERS_FOLDER = "answers"
QA_FOLDER = "qa_logs"
HEADLINES = ("num_problems", "exec_success_rate", "accepted_at_1", "pass_ratio_mean", "truncation_rate")

Outcomes = Mapping[str, Sequence[ErrorType]]
"""Error types of each problem's answers, by `problem_id`."""

_INTERVALS = "intervals"
_QA_SEED = "qa"


@dataclass(frozen=True)
class DatasetResult:
    """Results of one model on one dataset."""

    metrics: Metrics
    intervals: Intervals
    tier: int
    protocol: Mapping[str, Any]
    """How answers were generated and judged, as plain JSON; only models with the same protocol are comparable."""
    isolation: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall-clock seconds by phase."""

    @property
    def num_api_errors(self) -> int:
        """Number of answers without a verdict because the engine or the judge failed. The result is then incomplete.

        These answers count as incorrect, so the rates are too low.
        """
        num_answers = (self.metrics["num_problems"] or 0) * (self.metrics.get("num_samples") or 1)
        return round((self.metrics.get("api_error_rate") or 0.0) * num_answers)

    def rate(self, metric: str) -> float:
        """A metric that has an interval, and therefore a value."""
        value = self.metrics[metric]
        assert value is not None
        return value


@dataclass(frozen=True)
class EvaluatedModel:
    """One model and its results on every dataset."""

    label: str
    """`step_<N>`, or the model's name."""
    step: int | None
    """Optimizer step of the checkpoint; None for a model without a run."""
    checkpoint: Path
    export: str
    """The Hugging Face directory that was loaded, or the server's name of the model."""
    weights: str
    """Digest of the weights."""
    datasets: Mapping[str, DatasetResult]

    @property
    def saved_at(self) -> int:
        """The step. Only for checkpoints of a run."""
        assert self.step is not None
        return self.step

    @property
    def incomplete(self) -> dict[str, int]:
        """Number of answers without a verdict, by dataset with an incomplete result."""
        return {name: result.num_api_errors for name, result in self.datasets.items() if result.num_api_errors}

    def to_json(self) -> dict[str, Any]:
        """Content of `metrics.json`: each dataset's metrics with their intervals, then how they were obtained."""
        results = self.datasets.items()
        return {
            "label": self.label,
            "step": self.step,
            "checkpoint": str(self.checkpoint),
            "export": self.export,
            "weights": self.weights,
            "datasets": {name: metrics_with_intervals(result) for name, result in results},
            "incomplete": self.incomplete,
            "tier": {name: result.tier for name, result in results},
            "protocol": {name: dict(result.protocol) for name, result in results},
            "isolation": {name: result.isolation for name, result in results},
            "seconds": {name: dict(result.seconds) for name, result in results},
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> EvaluatedModel:
        """Inverse of `to_json`.

        Raises:
            KeyError: a key is missing, for example because another version wrote the file.
            TypeError: a value has the wrong type.
        """
        return EvaluatedModel(
            label=_typed(content["label"], str),
            step=_typed(content["step"], int, type(None)),
            checkpoint=Path(content["checkpoint"]),
            export=_typed(content["export"], str),
            weights=_typed(content["weights"], str),
            datasets={name: _result_from_json(content, name) for name in _typed(content["datasets"], dict)},
        )


def metrics_with_intervals(result: DatasetResult) -> dict[str, Any]:
    """The metrics of a dataset and, under `intervals`, the low and high bound of each metric that has an interval."""
    return {**result.metrics, _INTERVALS: {name: list(bounds) for name, bounds in result.intervals.items()}}


def _result_from_json(content: Mapping[str, Any], name: str) -> DatasetResult:
    metrics = dict(_typed(content["datasets"][name], dict))
    intervals = {
        metric: (float(low), float(high)) for metric, (low, high) in _typed(metrics.pop(_INTERVALS), dict).items()
    }
    for value in metrics.values():
        _typed(value, int, float, type(None))
    if not _typed(metrics["num_problems"], int) or not intervals.keys() <= metrics.keys():
        raise TypeError("no problems, or an interval without its metric")
    return DatasetResult(
        metrics,
        intervals,
        tier=_typed(content["tier"][name], int),
        protocol=_typed(content["protocol"][name], dict),
        isolation=_typed(content["isolation"][name], str),
        seconds={phase: _typed(value, int, float) for phase, value in _typed(content["seconds"][name], dict).items()},
    )


def _typed(value: Any, *types: type) -> Any:
    if not isinstance(value, types):
        raise TypeError(f"{value!r} has the wrong type")
    return value


# metrics.json and summary.json


def write_evaluation(directory: Path, model: EvaluatedModel) -> Path:
    """Replace `summary.json`, then `metrics.json`, whose presence means that all other files are complete.

    Args:
        directory: directory of the evaluation, such as `eval_step_200`; created if missing.

    Returns:
        The path of `metrics.json`.

    Raises:
        UserError: the directory cannot be created or written to.
        ValueError: a metric is not finite.
    """
    summary = {
        "label": model.label,
        "step": model.step,
        "checkpoint": str(model.checkpoint),
        "tier": max((result.tier for result in model.datasets.values()), default=None),
        "datasets": {name: _headlines(result) for name, result in model.datasets.items()},
    }
    write_json(directory / SUMMARY_FILE, summary)
    return write_json(directory / METRICS_FILE, model.to_json())


def _headlines(result: DatasetResult) -> dict[str, Any]:
    names = [name for name in result.metrics if name in HEADLINES or name.startswith("pass_at_")]
    intervals = {name: list(result.intervals[name]) for name in names if name in result.intervals}
    return {**{name: result.metrics[name] for name in names}, _INTERVALS: intervals}


def read_evaluation(directory: Path) -> EvaluatedModel:
    """Read `metrics.json`.

    Raises:
        UserError: it is missing or malformed.
    """
    return read_results(directory / METRICS_FILE, "evaluate the model again")


def read_results(path: Path, remedy: str) -> EvaluatedModel:
    """Read a file with the content of `metrics.json`.

    Raises:
        UserError: it is missing or malformed; the message ends with the remedy.
    """
    try:
        return EvaluatedModel.from_json(parse_json(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read the results in {path} ({error!r}); {remedy}") from error


def published_models(root: Path) -> list[EvaluatedModel]:
    """Every model with published results: a run's checkpoints by step, then models without a run.

    Args:
        root: the run's `eval/`; its checkpoints are expected next to it, even if they were evaluated elsewhere.
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


# Verdicts


def write_verdicts(directory: Path, dataset: str, judged: Iterable[JudgedAnswer]) -> Path:
    """Write `verdicts/<dataset>.jsonl`, one line per answer.

    Raises:
        UserError: the directory cannot be created or written to.
    """
    rows = (
        {
            "problem_id": one.problem.problem_id,
            "sample": one.sample,
            "error_type": one.verdict.error_type,
            "pass_ratio": one.verdict.pass_ratio,
            "num_passed": one.verdict.num_passed,
            "num_tests": one.verdict.num_tests,
            "judge_time": one.verdict.judge_time,
            "gen_tokens": one.answer.num_tokens,
            "truncated": one.answer.truncated,
        }
        for one in judged
    )
    return write_lines(directory / VERDICTS_FOLDER / f"{dataset}.jsonl", rows)


def read_outcomes(directory: Path) -> dict[str, Outcomes]:
    """Read every `verdicts/<dataset>.jsonl` of an evaluation.

    Returns:
        By dataset, the error types of each problem's answers, ordered by sample.

    Raises:
        UserError: a file cannot be read or has a malformed line.
    """
    return {path.stem: _read_outcomes(path) for path in sorted((directory / VERDICTS_FOLDER).glob("*.jsonl"))}


def _read_outcomes(path: Path) -> Outcomes:
    samples: dict[str, dict[int, ErrorType]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for row in map(parse_json, file):
                kind = ERROR_TYPES[ERROR_TYPES.index(row["error_type"])]
                samples.setdefault(row["problem_id"], {})[row["sample"]] = kind
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the verdicts in {path} ({error!r}); evaluate the model again") from error
    return {name: tuple(kinds[sample] for sample in sorted(kinds)) for name, kinds in samples.items()}


# All answers, and the question-and-answer log: some answers of each error type, to be read by people


def sample_answers(judged: Sequence[JudgedAnswer], per_error_type: int) -> list[JudgedAnswer]:
    """Sample answers of each error type.

    The sample depends only on problem and sample number, so the logs of all checkpoints show the same problems as long
    as their error types agree.

    Args:
        judged: all answers of a dataset.
        per_error_type: maximum number of answers of one error type.

    Returns:
        The sample by error type, each in the order of `judged`.
    """
    sampled = []
    for kind in ERROR_TYPES:
        of_kind = [one for one in judged if one.verdict.error_type == kind]
        lowest = set(sorted(map(_rank, of_kind))[:per_error_type])
        sampled += [one for one in of_kind if _rank(one) in lowest]
    return sampled


def _rank(judged: JudgedAnswer) -> bytes:
    # a random but reproducible order: a digest is the same in every process and on every machine
    name = f"{_QA_SEED}/{judged.sample}/{judged.problem.problem_id}"
    return hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()


def qa_row(judged: JudgedAnswer) -> dict[str, Any]:
    """One answer as a row of the log."""
    answer, verdict = judged.answer, judged.verdict
    return {
        "problem_id": judged.problem.problem_id,
        "sample": judged.sample,
        "family": judged.problem.family,
        "prompt": judged.problem.prompt,
        "answer": answer.text,
        "program": extract_program(judged.problem, answer.text),
        "error_type": verdict.error_type,
        "message": verdict.message,
        "num_passed": verdict.num_passed,
        "num_tests": verdict.num_tests,
        "pass_ratio": verdict.pass_ratio,
        "gen_tokens": answer.num_tokens,
        "truncated": answer.truncated,
        "error": answer.error,
        "judge_time": round(verdict.judge_time, 4),
    }


def write_answers(directory: Path, dataset: str, judged: Iterable[JudgedAnswer]) -> Path:
    """Write every answer to `answers/<dataset>.jsonl`, in rows like those of the question-and-answer log.

    Raises:
        UserError: the directory cannot be created or written to.
    """
    return write_lines(directory / ANSWERS_FOLDER / f"{dataset}.jsonl", map(qa_row, judged))


def write_qa_log(directory: Path, dataset: str, judged: Sequence[JudgedAnswer], per_error_type: int = 10) -> Path:
    """Write a sample of the answers to `qa_logs/<dataset>_qa.jsonl`.

    Args:
        per_error_type: maximum number of answers of one error type.

    Raises:
        UserError: the directory cannot be created or written to.
    """
    rows = map(qa_row, sample_answers(judged, per_error_type))
    return write_lines(directory / QA_FOLDER / f"{dataset}_qa.jsonl", rows)


def read_qa_logs(directory: Path, datasets: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of an evaluation's logs, by dataset.

    Raises:
        UserError: a log is missing or malformed.
    """
    logs = {}
    for dataset in datasets:
        path = directory / QA_FOLDER / f"{dataset}_qa.jsonl"
        try:
            logs[dataset] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {path} ({error}); evaluate the model again") from error
    return logs


# Atomic writes


def write_text(path: Path, text: str) -> Path:
    """Replace a text file; its directory is created if missing.

    Raises:
        UserError: it cannot be written.
    """
    return _replace(path, [text])


def write_json(path: Path, content: Mapping[str, Any]) -> Path:
    """Replace a JSON file; its directory is created if missing.

    Raises:
        UserError: it cannot be written.
        ValueError: a number is not finite, which JSON cannot represent.
    """
    return _replace(path, [json.dumps(content, indent=2, allow_nan=False), "\n"])


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Replace a JSON Lines file; its directory is created if missing. Any text can be written, even lone surrogates.

    Raises:
        UserError: it cannot be written.
        ValueError: a number is not finite.
    """
    return _replace(path, (encodable(json.dumps(row, ensure_ascii=False, allow_nan=False)) + "\n" for row in rows))


def _replace(path: Path, pieces: Iterable[str]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, pieces)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error}); free disk space or use another output directory") from error
    return path


def encodable(value: Any) -> Any:
    """A value for a UTF-8 file: text with each lone surrogate as an escape, which is valid in JSON too."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
