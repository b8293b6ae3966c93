"""Loads the problems of a data set, and tells one set of problems from another."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict

import xxhash

from eval_pipeline.problems import codecontests, gsm8k, humaneval, mbpp, quickstart, verl_rl
from eval_pipeline.problems.own_format import OwnFormat
from eval_pipeline.problems.problem import DatasetSource, Problem
from eval_pipeline.problems.record import Record
from eval_pipeline.problems.source import read_records
from verl_ext.errors import UserError
from verl_ext.plugins import PLUGIN_FORM

Parser = Callable[[Record], Problem]
FORMATS: dict[str, Parser] = {
    "quickstart": quickstart.parse_problem,
    "humaneval": humaneval.parse_problem,
    "mbpp": mbpp.parse_problem,
    "codecontests": codecontests.parse_problem,
    "gsm8k": gsm8k.parse_problem,
    "verl": verl_rl.parse_problem,
}


def parser_of(format: str, key: str) -> Parser:
    """What makes problems of the rows of a format: one of `FORMATS`, or a function of the user's own.

    Args:
        format: as a recipe says it.
        key: where it says so, for messages.

    Raises:
        UserError: there is no such format, or the function cannot be loaded.
    """
    if format in FORMATS:
        return FORMATS[format]
    if ":" in format:
        return OwnFormat.named(format, key)
    raise UserError(f"{key} is {format!r}; use one of {', '.join(FORMATS)}, or {PLUGIN_FORM}")


def load_problems(source: DatasetSource) -> list[Problem]:
    """Read and check the problems of a data set, in the order of the file. Keys that a format does not use are left.

    Raises:
        UserError: the source cannot be read, holds no problems, or a row is not a problem of its format; the message
            names the line or row and the key.
    """
    parse = parser_of(source.format, f"the format of the data set {source.name}")
    problems: dict[str, Problem] = {}
    for record in read_records(source):
        problem = parse(record)
        if problem.problem_id in problems:
            raise record.error(f"problem_id {problem.problem_id!r} occurs twice; give every problem a unique id")
        problems[problem.problem_id] = problem
    if not problems:
        raise UserError(f"{source.path} holds no problems; write one JSON object per line")
    return list(problems.values())


def problems_digest(problems: Iterable[Problem]) -> str:
    """Name of what is asked and how it is judged, so that figures of different problems are not compared.

    Returns:
        xxh3_128, as 32 hexadecimal digits, over each problem's id, prompt and tests in their order. Families and
        canonical solutions decide no verdict and are left out.
    """
    digest = xxhash.xxh3_128()
    for problem in problems:
        tests = [type(problem.tests).__name__, asdict(problem.tests)]
        digest.update(json.dumps([problem.problem_id, problem.prompt, tests], sort_keys=True).encode() + b"\n")
    return digest.hexdigest()
