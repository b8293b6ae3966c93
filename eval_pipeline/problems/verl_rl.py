"""verl's RL format, which GRPO trains on, so that an evaluation uses the same prompts and tests as training."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, TypeGuard

import regex

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer, ScoredAnswer, Tests
from eval_pipeline.judge.scorers import require_scorer
from eval_pipeline.judge.verdicts import outputs_match
from eval_pipeline.problems.formats import bare_reference, damage_of_reference
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import PARSE_ERRORS, fault_of_test, parse
from eval_pipeline.problems.record import Record
from verl_ext.chat_text import decoded_turns
from verl_ext.console import warn
from verl_ext.errors import UserError, one_line
from verl_ext.files import parse_json

ROLES = ("system", "user", "assistant")
_OF_FUNCTIONS = ("preamble", "code_prompt")
_FORM = "use a JSON object with entry_point and tests, or with inputs and outputs of the same length"

_BEGINS_AS_OBJECT = regex.compile(r'[\s\ufeff]*\{\s*"(?:[^"\\]++|\\.)*+(?:"\s*(?::|\Z)|\Z)', regex.DOTALL)
"""A JSON object up to its first colon, or cut off before it. A set of strings has a comma there."""
_BEGINS_AS_TESTS = regex.compile(
    r"""[\s\ufeff\[]*\{\s*["']?(?:entry_point|tests?|test_list|inputs?|outputs?|fn_name|preamble|code_prompt)["']?\s*:"""
    r"""|\s*\[\s*["']\s*assert\b"""
)
"""Tests in another form: a dictionary of Python, a list with one object per test, or a list of assertions."""
_CONTAINS_TESTS = regex.compile(r"^\s*(?:assert|(?:async\s+)?def|class)\b", regex.MULTILINE)
"""Text that is Python source, if it parses."""
_COMPRESSED = regex.compile(r"(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])(?=[^0-9]*[0-9])[A-Za-z0-9+/\s]{200,}={0,2}\s*")
"""Base64, as LiveCodeBench has it around compressed tests; no answer is that long without any other sign."""


def parse_problem(record: Record) -> Problem:
    """The problem of one row: `prompt`, `reward_model.ground_truth`, and optionally a name in `extra_info.problem_id`.

    Raises:
        UserError: the prompt does not end with a user turn, or there are no tests, or every answer passes one.
    """
    extra = record.fields.get("extra_info")
    named = extra.get("problem_id") if isinstance(extra, Mapping) else None
    problem_id = f"{record.number}" if named is None else str(named)
    judged_by = record.fields.get("reward_model")
    ground_truth = judged_by.get("ground_truth") if isinstance(judged_by, Mapping) else None
    try:
        tests = read_tests(ground_truth, problem_id)
        if isinstance(tests, ScoredAnswer):
            require_scorer(tests.task)
        refuse_idle_tests(tests, problem_id)
    except UserError as error:
        raise record.error(str(error)) from error
    *earlier, (_, prompt) = _turns(record)
    return Problem(problem_id, prompt, tests, earlier=tuple(earlier))


def _turns(record: Record) -> list[tuple[str, str]]:
    """Role and text of each turn of the prompt."""
    if record.fields.get("tools") not in (None, "", "[]", []):
        raise record.error(
            "it has tools, which evaluation does not render; describe them in the system turn, and remove 'tools'"
        )
    try:
        turns = decoded_turns(record.fields.get("prompt"))
    except UserError as error:
        raise record.error(str(error)) from error
    if isinstance(turns, str):
        return [("user", record.text("prompt"))]
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, Mapping) for turn in turns):
        raise record.error("'prompt' must be a string or a list of turns with role and content")
    if turns[-1].get("role") != "user" or any(turn.get("role") not in ROLES for turn in turns):
        raise record.error(f"the turns of 'prompt' must be by {', '.join(ROLES)}, and the last one by user")
    texts = [Record(record.where, record.number, {"prompt": turn.get("content")}).text("prompt") for turn in turns]
    return [(turn["role"], text) for turn, text in zip(turns, texts)]


def read_tests(ground_truth: Any, problem_id: str) -> Tests:
    """The tests that a ground truth describes.

    A mapping, or its JSON, with `entry_point` and `tests` (a list of Python sources; optionally `preamble` and
    `code_prompt`) describes a function; one with `inputs` and `outputs` (verl's format for code; optionally
    `tolerance` and `any_case`) a program; one with `reasoning_gym` and `entry` an entry of that dataset. Any other text
    or number is the correct answer itself, in a box or behind `####` if there is one; a JSON string is decoded first.

    Raises:
        UserError: the ground truth is missing, or looks like tests but cannot be read, so that every answer would be
            wrong.
    """
    text = value = ground_truth
    while isinstance(value, str):
        text, value = value, _from_json(value, problem_id)
    if isinstance(value, dict):
        return _tests_of(value, problem_id)
    if isinstance(text, list):
        raise UserError(
            f"reward_model.ground_truth of {problem_id} is a list; join its values into one text, such as '1, 2'"
        )
    if not isinstance(text, str | int | float) or not str(text).strip():
        raise UserError(f"{problem_id} lacks reward_model.ground_truth; set it to a string, a number or tests")
    if _BEGINS_AS_TESTS.match(str(text)):
        raise UserError(f"cannot read the tests of {problem_id} (reward_model.ground_truth); {_FORM}")
    if _is_source(str(text)):
        raise UserError(f"the reward_model.ground_truth of {problem_id} is Python source; {_FORM}")
    if _COMPRESSED.fullmatch(str(text)):
        raise UserError(f"the reward_model.ground_truth of {problem_id} is base64; decode it, then {_FORM}")
    if not (reference := bare_reference(str(text))):
        raise UserError(f"the reward_model.ground_truth of {problem_id} is {str(text)!r}, an empty answer; set it")
    return ReferenceAnswer(reference)


def _from_json(text: str, problem_id: str) -> Any:
    """The value, or None if the text is not JSON; refuses text that was meant to be an object."""
    try:
        return parse_json(text)
    except ValueError as error:
        if _BEGINS_AS_OBJECT.match(text) or _BEGINS_AS_TESTS.match(text):
            raise UserError(
                f"the reward_model.ground_truth of {problem_id} looks like tests but is not valid JSON ({error}); "
                f"{_FORM}"
            ) from error
        return None


def _tests_of(fields: Mapping[str, Any], problem_id: str) -> Tests:
    if isinstance(task := fields.get("reasoning_gym"), str) and isinstance(fields.get("entry"), dict):
        return ScoredAnswer(task, json.dumps(fields["entry"]))
    if _is_list_of_text(fields.get("tests")) and isinstance(fields.get("entry_point"), str):
        more = {key: str(fields.get(key) or "") for key in _OF_FUNCTIONS}
        return FunctionTests(fields["entry_point"], tuple(fields["tests"]), **more)
    if _is_program(fields):
        return ProgramTests(
            tuple(map(ProgramCase, fields["inputs"], fields["outputs"])),
            fields.get("tolerance"),
            fields.get("any_case") is True,
        )
    if fields.get("fn_name") is not None:
        raise UserError(
            f"the tests of {problem_id} (reward_model.ground_truth) have fn_name, which is not supported; use "
            "entry_point and tests, such as ['assert f(1) == 2'], instead of fn_name, inputs and outputs"
        )
    raise UserError(f"cannot read the tests of {problem_id} (reward_model.ground_truth); {_FORM}")


def _is_source(text: str) -> bool:
    """Whether a text is Python with an assert or a definition."""
    if not _CONTAINS_TESTS.search(text):
        return False
    try:
        tree = parse(text)
    except PARSE_ERRORS:
        return False
    kinds = (ast.Assert, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in tree.body)


def refuse_idle_tests(tests: Tests, where: str) -> None:
    """Refuse references and tests that no answer passes, or every answer, and tests that contradict each other.

    Not part of `read_tests`, which rewards call for every answer.

    Args:
        tests: the tests of a row.
        where: the row.

    Raises:
        UserError: a reference is damaged, a test does not parse or never uses the answer, or two tests have the same
            input and different outputs.
    """
    if isinstance(tests, ReferenceAnswer) and (fault := damage_of_reference(tests.answer)) is not None:
        raise UserError(f"the ground truth of {where}, {tests.answer[:60]!r}, {fault}")
    if isinstance(tests, ProgramTests) and (stdin := _contradictory_input(tests)) is not None:
        raise UserError(f"two tests of {where} have the input {stdin[:40]!r} and different outputs; remove one")
    for index, source in enumerate(tests.tests if isinstance(tests, FunctionTests) else ()):
        try:
            fault = fault_of_test(parse(source), needs_assert=False)
        except PARSE_ERRORS as error:
            fault = f"is not Python ({one_line(error)}); correct it"
        if fault is not None:
            raise UserError(f"tests[{index}] of {where} {fault}")


def refuse_long_outputs(tests: Tests, where: str, output_mb: float, fix: str) -> None:
    """Refuse tests that no program passes, because the judge cuts off longer outputs.

    Args:
        tests: the tests of a row.
        where: the row.
        output_mb: the judge's limit.
        fix: how to fix the row.

    Raises:
        UserError: an expected output exceeds the limit, even without the white space that the judge ignores.
    """
    limit = int(output_mb * 2**20)
    for index, case in enumerate(tests.cases if isinstance(tests, ProgramTests) else ()):
        if 4 * len(case.expected) <= limit:  # a character has at most four bytes
            continue
        size = len("\n".join(" ".join(line.split()) for line in case.expected.strip().split("\n")).encode())
        if size > limit:
            raise UserError(
                f"output {index} of {where} has {size:,} bytes, but the judge reads at most {limit:,}, so no program "
                f"passes; {fix}"
            )


_NEEDS_ONE_PROCESS = regex.compile(
    r"\b(?:unittest\.mock|import\s+mock|from\s+mock|from\s+unittest\s+import\b.*\bmock|mock\.patch"
    r"|tempfile\.|(?:import|from)\s+tempfile|redirect_stdout|redirect_stderr|capsys)\b"
)


def needs_one_process(tests: Tests) -> bool:
    """Whether right answers may fail Python tests because a test and its answer run in separate processes."""
    return isinstance(tests, FunctionTests) and any(map(_NEEDS_ONE_PROCESS.search, tests.tests))


def warn_of_divided_tests(num_rows: int, where: str) -> None:
    """Warn of the rows of a dataset of which `needs_one_process` is true."""
    if num_rows:
        warn(
            f"{num_rows} row{'' if num_rows == 1 else 's'} of {where} may fail right answers, because the tests use "
            "mock, tempfile, redirect_stdout or capsys, but run in another process and directory than the answer; "
            "test what a function returns, or drop the rows"
        )


def ground_truth_of(tests: Tests) -> str:
    """The ground truth that `read_tests` reads as these tests."""
    if isinstance(tests, ReferenceAnswer):
        return tests.answer
    if isinstance(tests, ScoredAnswer):
        return json.dumps({"reasoning_gym": tests.task, "entry": json.loads(tests.entry)})
    if isinstance(tests, FunctionTests):
        more = {key: getattr(tests, key) for key in _OF_FUNCTIONS if getattr(tests, key)}
        return json.dumps({"entry_point": tests.entry_point, "tests": list(tests.tests), **more})
    inputs, outputs = [case.stdin for case in tests.cases], [case.expected for case in tests.cases]
    more = ({} if tests.tolerance is None else {"tolerance": tests.tolerance}) | (
        {"any_case": True} if tests.any_case else {}
    )
    return json.dumps({"inputs": inputs, "outputs": outputs, **more})


def _is_program(fields: Mapping[str, Any]) -> bool:
    """Whether the fields describe a program, and not a function by `fn_name`."""
    inputs, outputs, tolerance = (fields.get(key) for key in ("inputs", "outputs", "tolerance"))
    return (
        _is_list_of_text(inputs)
        and _is_list_of_text(outputs)
        and len(inputs) == len(outputs)
        and isinstance(tolerance, int | float | None)
        and fields.get("fn_name") is None
    )


def _contradictory_input(tests: ProgramTests) -> str | None:
    """An input for which two tests expect different outputs, so that no program passes; None if there is none."""
    first: dict[str, ProgramCase] = {}
    for case in tests.cases:
        earlier = first.setdefault(case.stdin, case)
        options = tests.tolerance, tests.any_case
        if case.expected != earlier.expected and not outputs_match(case.expected, earlier.expected, *options):
            return case.stdin
    return None


def _is_list_of_text(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) for item in value)
