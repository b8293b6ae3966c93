"""The verdicts of an evaluation on the disk; two models are compared by them problem by problem."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval_pipeline.figures.comparison import Outcomes
from eval_pipeline.figures.judged import Judged
from eval_pipeline.figures.writing import write_lines
from eval_pipeline.judge import ERROR_TYPES, ErrorType
from verl_ext.errors import UserError
from verl_ext.files import parse_json

VERDICTS_FOLDER = "verdicts"


def write_verdicts(directory: Path, dataset: str, judged: Iterable[Judged]) -> Path:
    """Write `verdicts/<dataset>.jsonl`, a line for each answer.

    Raises:
        UserError: the directory cannot be made or written to.
    """
    return write_lines(directory / VERDICTS_FOLDER / f"{dataset}.jsonl", map(_verdict_row, judged))


def read_outcomes(directory: Path) -> dict[str, Outcomes]:
    """Read every `verdicts/<dataset>.jsonl` of an evaluation.

    Returns:
        By data set, the error types of each problem's answers in the order of the samples.

    Raises:
        UserError: a file cannot be read or has a malformed line.
    """
    return {path.stem: _read_outcomes(path) for path in sorted((directory / VERDICTS_FOLDER).glob("*.jsonl"))}


def _verdict_row(judged: Judged) -> dict[str, Any]:
    verdict = judged.verdict
    return {
        "problem_id": judged.problem.problem_id,
        "sample": judged.sample,
        "error_type": verdict.error_type,
        "pass_ratio": verdict.pass_ratio,
        "num_passed": verdict.num_passed,
        "num_tests": verdict.num_tests,
        "judge_time": verdict.judge_time,
        "gen_tokens": judged.answer.num_tokens,
        "truncated": judged.answer.truncated,
    }


def _read_outcomes(path: Path) -> Outcomes:
    samples: dict[str, dict[int, ErrorType]] = {}
    try:
        with open(path, encoding="utf-8") as file:
            for row in map(parse_json, file):
                kind = ERROR_TYPES[ERROR_TYPES.index(row["error_type"])]
                samples.setdefault(row["problem_id"], {})[row["sample"]] = kind
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"cannot read the verdicts in {path} ({error!r}); evaluate the model again") from error
    return {name: _in_order(kinds) for name, kinds in samples.items()}


def _in_order(kinds: Mapping[int, ErrorType]) -> Sequence[ErrorType]:
    return tuple(kinds[sample] for sample in sorted(kinds))
