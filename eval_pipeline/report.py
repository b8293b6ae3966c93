"""What an evaluation leaves behind: `metrics.json`, the question-and-answer log, and a table for the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_pipeline.engine import Answer
from eval_pipeline.problems import Problem
from eval_pipeline.verdict import Verdict
from verl_ext.errors import UserError
from verl_ext.metrics.atomic import replace_file

METRICS_FILE = "metrics.json"
QA_FOLDER = "qa_logs"

Figures = Mapping[str, float | int | None]


def prepare_output(directory: Path) -> None:
    """Make the output directory, before minutes are spent on answers that could not be written.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        (directory / QA_FOLDER).mkdir(parents=True, exist_ok=True)
        (directory / METRICS_FILE).unlink(missing_ok=True)  # no old figures beside new answers
    except OSError as error:
        raise UserError(f"Cannot write to {directory} ({error}); name another directory with --output.") from error


def write_qa_log(
    directory: Path,
    dataset: str,
    problems: Sequence[Problem],
    answers: Sequence[Answer],
    codes: Sequence[str],
    verdicts: Sequence[Verdict],
) -> Path:
    """Write `qa_logs/<dataset>_qa.jsonl`, a line for each problem; the four sequences are in the same order.

    Raises:
        OSError: the disk is full or the directory not writable.
    """
    path = directory / QA_FOLDER / f"{dataset}_qa.jsonl"
    rows = map(_qa_row, problems, answers, codes, verdicts)
    replace_file(path, (_one_line(row) for row in rows))
    return path


def write_metrics(directory: Path, content: Mapping[str, Any]) -> Path:
    """Write `metrics.json` whole or not at all; written last, its presence says that the evaluation is complete.

    Raises:
        OSError: the disk is full or the directory not writable.
    """
    path = directory / METRICS_FILE
    replace_file(path, [json.dumps(content, indent=2, allow_nan=False), "\n"])
    return path


def format_table(dataset: str, figures: Figures) -> str:
    """The figures of one data set as two aligned columns; a figure that does not exist shows as a dash."""
    width = max(len(name) for name in figures)
    return "\n".join([dataset, *(f"  {name:<{width}}  {_cell(value):>10}" for name, value in figures.items())])


def _qa_row(problem: Problem, answer: Answer, code: str, verdict: Verdict) -> dict[str, Any]:
    return {
        "problem_id": problem.problem_id,
        "family": problem.family,
        "prompt": problem.prompt,
        "answer": answer.text,
        "code": code,
        "error_type": verdict.error_type,
        "message": verdict.message,
        "num_passed": verdict.num_passed,
        "num_tests": verdict.num_tests,
        "pass_ratio": verdict.pass_ratio,
        "gen_tokens": answer.num_tokens,
        "truncated": answer.truncated,
        "judge_s": round(verdict.judge_s, 4),
    }


def _one_line(row: Mapping[str, Any]) -> str:
    line = json.dumps(row, ensure_ascii=False)
    # a lone surrogate has no UTF-8; as an escape it is good JSON
    return line.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"


def _cell(value: float | int | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.4f}"
