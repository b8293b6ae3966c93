"""The question-and-answer log: some answers of each error type, for a person to read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from eval_pipeline.figures.judged import Judged
from eval_pipeline.figures.writing import write_lines
from eval_pipeline.judge import ERROR_TYPES
from verl_ext.errors import UserError

QA_FOLDER = "qa_logs"

_SEED = "qa"


def sample_answers(judged: Sequence[Judged], per_error_type: int = 10) -> list[Judged]:
    """Draw answers evenly from the error types.

    Which answers are drawn hangs on their problem and number alone, not on their order: the same problems come up in
    the logs of all checkpoints as far as they end the same way there.

    Args:
        judged: all answers of a data set.
        per_error_type: most answers of one error type.

    Returns:
        The sample, error type by error type, within each in the order of `judged`.
    """
    drawn = []
    for kind in ERROR_TYPES:
        of_kind = [one for one in judged if one.verdict.error_type == kind]
        lowest = set(sorted(map(_rank, of_kind))[:per_error_type])
        drawn += [one for one in of_kind if _rank(one) in lowest]
    return drawn


def qa_row(judged: Judged) -> dict[str, Any]:
    """One answer as a row of the log."""
    answer, verdict = judged.answer, judged.verdict
    return {
        "problem_id": judged.problem.problem_id,
        "sample": judged.sample,
        "family": judged.problem.family,
        "prompt": judged.problem.prompt,
        "answer": answer.text,
        "program": judged.program,
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


def write_qa_log(directory: Path, dataset: str, judged: Sequence[Judged], per_error_type: int = 10) -> Path:
    """Write the sample to `qa_logs/<dataset>_qa.jsonl`.

    Args:
        directory: the evaluation's.
        dataset: name of the data set.
        judged: all its answers.
        per_error_type: most answers of one error type.

    Raises:
        UserError: the directory cannot be made or written to.
    """
    rows = map(qa_row, sample_answers(judged, per_error_type))
    return write_lines(directory / QA_FOLDER / f"{dataset}_qa.jsonl", rows)


def read_qa_logs(directory: Path, datasets: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the logs of an evaluation, by data set.

    Raises:
        UserError: a log is missing or malformed.
    """
    return {dataset: _read_rows(directory / QA_FOLDER / f"{dataset}_qa.jsonl") for dataset in datasets}


def _read_rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); evaluate the model again") from error


def _rank(judged: Judged) -> bytes:
    # a random order with a fixed seed: a digest is the same in every process and on every machine
    name = f"{_SEED}/{judged.sample}/{judged.problem.problem_id}"
    return hashlib.sha256(name.encode("utf-8", "backslashreplace")).digest()
