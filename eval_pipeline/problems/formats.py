"""Formats of published datasets: the quickstart, HumanEval, MBPP, GSM8K, MATH, CodeContests.

A `parse_` function returns the problem of one row. It raises a `UserError` if a key is missing or has the wrong type,
if code does not parse, or if there is no test.
"""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer
from eval_pipeline.judge.numeric_answer import has_decoded_escape, joined_boxes, last_boxed, parse_number
from eval_pipeline.judge.verdicts import outputs_match
from eval_pipeline.problems.problem import Problem
from eval_pipeline.problems.python_source import (
    PARSE_ERRORS,
    called_names,
    can_fail,
    defined_names,
    fault_of_test,
    find_definition,
    parse,
    running_nodes,
    unknown_names,
)
from eval_pipeline.problems.record import Record

# The quickstart: `problem_id`, `prompt`, `entry_point`, `tests`, and optionally `family` and `canonical_solution`


def parse_quickstart(record: Record) -> Problem:
    """The problem of one row."""
    return Problem(
        problem_id=record.text("problem_id"),
        prompt=record.text("prompt"),
        tests=FunctionTests(_entry_point(record), tuple(_asserts("tests", record))),
        family=record.optional_text("family"),
        canonical_solution=record.optional_text("canonical_solution"),
    )


def _entry_point(record: Record) -> str:
    """The `entry_point` of the row, which must be a bare name."""
    name = record.text("entry_point")
    if not name.isidentifier():
        raise record.error(f"'entry_point' is {name!r}; it must be the bare name of a function or class")
    return name


def _asserts(key: str, record: Record) -> list[str]:
    """The tests under a key. A test that cannot run would count against the model, and one without assert for it."""
    tests = record.fields.get(key)
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise record.error(f"{key!r} must be a list of at least one Python assert statement")
    for index, test in enumerate(record.texts(key)):
        tree = _parsed(test, f"{key}[{index}]", record, "the assert statement")
        if (fault := fault_of_test(tree)) is not None:
            raise record.error(f"{key}[{index}] {fault}")
    return tests


def _parsed(source: str, what: str, record: Record, to_correct: str = "it") -> ast.Module:
    try:
        return parse(source)
    except PARSE_ERRORS as error:
        raise record.error(f"{what} is not Python ({error}); correct {to_correct}") from error


# HumanEval (Chen et al. 2021, arXiv 2107.03374): `task_id`, `prompt`, `entry_point`, `test`, `canonical_solution`.
# `openai/openai_humaneval` and HumanEval+ (`evalplus/humanevalplus`) use the same keys. HumanEval+ tests import NumPy.

_HUMANEVAL_INSTRUCTION = """Here is the beginning of a Python program:

```python
{code}
```

Implement `{entry_point}` as its docstring describes. Reply with the whole program, the beginning included, in one \
```python code block."""


def parse_humaneval(record: Record) -> Problem:
    """The problem of one row. Its only test is the row's whole `test`, followed by a call of `check`."""
    name, prompt = _entry_point(record), record.text("prompt")
    code_prompt = prompt if prompt.endswith("\n") else prompt + "\n"
    test = f"{record.text('test').rstrip()}\n\ncheck({name})\n"
    check = find_definition(_parsed(test, "'test'", record), "check")
    if check is None:
        raise record.error("'test' defines no function `check`; write one that takes the function to test")
    if not can_fail(running_nodes([check], "check")[0]):
        raise record.error("the function `check` of 'test' asserts nothing; write assert statements in it")
    solution = record.optional_text("canonical_solution")
    return Problem(
        problem_id=record.text("task_id", "problem_id"),
        prompt=_HUMANEVAL_INSTRUCTION.format(code=prompt.strip("\n"), entry_point=name),
        tests=FunctionTests(
            entry_point=name,
            tests=(test,),
            preamble=_humaneval_preamble(code_prompt, name, record),
            code_prompt=code_prompt,
        ),
        canonical_solution=None if solution is None else code_prompt + solution,
    )


def _humaneval_preamble(code_prompt: str, name: str, record: Record) -> str:
    """The code before the function: imports, and helpers that both solution and test may call."""
    try:
        # without a docstring, the head has no body yet
        definition = find_definition(parse(f"{code_prompt}    ...\n"), name)
    except PARSE_ERRORS as error:
        raise record.error(f"'prompt' is not the beginning of a Python program ({error}); correct it") from error
    if definition is None:
        raise record.error(f"'prompt' does not end with the head of {name!r}; correct 'prompt' or 'entry_point'")
    start = min(node.lineno for node in (definition, *definition.decorator_list))
    lines = code_prompt.split("\n")[: start - 1]
    return "\n".join(lines).strip("\n") + "\n" if any(line.strip() for line in lines) else ""


# MBPP, both published variants (Austin et al. 2021, arXiv 2108.07732). Full: `task_id`, `text`, `code`, `test_list`,
# `test_setup_code`. Sanitized: `task_id`, `prompt`, `code`, `test_list`, `test_imports`. Each assert of `test_list` is
# one test. As in the paper's protocol, `challenge_test_list` is not used.

_MBPP_INSTRUCTION = """{task}

Write a Python program for this task. These checks have to pass with it:

```python
{checks}
```

Reply with the whole program in one ```python code block, without the checks."""


def parse_mbpp(record: Record) -> Problem:
    """The problem of one row. Its prompt shows the tests, because only they contain the function's name.

    Setup code that needs a definition of the answer, such as a class whose objects the asserts pass in, cannot be a
    preamble; it becomes the beginning of each test.
    """
    code, asserts, setup = record.text("code"), _asserts("test_list", record), _setup(record)
    alone = not unknown_names(_parsed(setup, "the setup code", record))
    shown = asserts if alone else [setup.strip("\n"), *asserts]
    return Problem(
        problem_id=f"mbpp/{record.identifier('task_id')}",
        prompt=_MBPP_INSTRUCTION.format(task=record.text("text", "prompt").strip(), checks="\n".join(shown)),
        tests=FunctionTests(
            entry_point=_mbpp_entry_point(_parsed(code, "'code'", record), asserts, record),
            tests=tuple(asserts if alone else [f"{setup}{test}" for test in asserts]),
            preamble=setup if alone else "",
        ),
        canonical_solution=code,
    )


def _setup(record: Record) -> str:
    # setup code in the published file has Windows line endings
    parts = [*record.texts("test_imports"), record.optional_code("test_setup_code").replace("\r\n", "\n")]
    return "".join(f"{part.rstrip()}\n" for part in parts if part.strip())


def _mbpp_entry_point(code: ast.Module, asserts: list[str], record: Record) -> str:
    """The first function of the reference code that an assert calls; a class only if no function is called."""
    is_class = defined_names(code)
    called = [name for test in asserts for name in called_names(parse(test)) if name in is_class]
    if not called:
        raise record.error("no assert of 'test_list' calls a function that 'code' defines; correct one of them")
    return min(called, key=lambda name: is_class[name])


# GSM8K (Cobbe et al. 2021, arXiv 2110.14168): `question`, and `answer`, which ends with `#### 42`

_GSM8K_INSTRUCTION = """{question}

Solve this step by step. Then write the result as a number, without words, on a last line of its own that begins \
with ####."""


def parse_gsm8k(record: Record) -> Problem:
    """The problem of one row, which asks for the `#### 42` form of the dataset.

    The judge also accepts `<answer>42</answer>` and `\\boxed{42}`, so that models trained on those forms are not judged
    by the form. Rows without an `id` are named after their number in the file, starting with `gsm8k/1`.
    """
    question, answer = record.text("question"), record.text("answer")
    _, mark, reference = answer.rpartition("####")
    if not mark or parse_number(reference) is None:
        raise record.error("'answer' must end with #### and a number")
    row_id = record.first("id", "task_id", "problem_id")
    return Problem(
        problem_id=f"gsm8k/{record.number}" if row_id is None else record.identifier("id", "task_id", "problem_id"),
        prompt=_GSM8K_INSTRUCTION.format(question=question.strip()),
        tests=ReferenceAnswer(reference.strip()),
        canonical_solution=answer,
    )


# MATH (Hendrycks et al. 2021, arXiv 2103.03874), MATH-500 and AIME: `problem`, and `answer` or a `solution` whose last
# `\boxed{...}` is the answer

_CHOICE_KEYS = ("options", "choices")
_UNANSWERED = ("proof", "notfound", "not found")
"""Answers of NuminaMath's rows that have no result to compare."""
_MATH_INSTRUCTION = """{problem}

Solve this step by step. Then write the result inside \\boxed{{}}."""


def parse_math(record: Record) -> Problem:
    """The problem of one row. Rows without an id are named `math/1`, `math/2`, after their number in the file."""
    ids = ("unique_id", "problem_id", "task_id", "id", "ID")
    if key := next((key for key in _CHOICE_KEYS if record.fields.get(key)), None):
        raise record.error(
            f"{key!r} contains choices, which the format math does not show to the model; write them into the problem, "
            f"set the answer to a letter or a value, and remove {key!r}"
        )
    solution = record.optional_text("solution", "Solution")
    reference = _math_answer(record) or (last_boxed(solution or "") or "").strip()
    if not reference:
        raise record.error("there is no 'answer', and 'solution' has no \\boxed{...}; add the answer")
    return Problem(
        problem_id=f"math/{record.number}" if record.first(*ids) is None else record.identifier(*ids),
        prompt=_MATH_INSTRUCTION.format(problem=record.text("problem", "question", "Problem", "prompt").strip()),
        tests=ReferenceAnswer(reference),
        canonical_solution=solution,
    )


def _math_answer(record: Record) -> str:
    """The answer of the row, without the box around it; empty if the row has none."""
    answer = record.first("answer", "Answer")
    if answer is None or answer == "":
        return ""
    is_number = isinstance(answer, (int, float)) and not isinstance(answer, bool) and math.isfinite(answer)
    text = str(answer) if is_number else record.text("answer", "Answer")
    if text.strip().casefold() in _UNANSWERED:
        raise record.error(f"'answer' is {text.strip()!r}, which no answer of a model equals; remove the row")
    if (fault := damage_of_reference(text)) is not None:
        raise record.error(f"'answer' {fault}")
    return bare_reference(text).strip()


def damage_of_reference(text: str) -> str | None:
    """How a reference is damaged, and what to do; None if it is not."""
    if has_decoded_escape(text):
        return "has a control character where LaTeX has a backslash; write \\\\frac in JSON"
    return None


def bare_reference(text: str) -> str:
    """The reference without the box around it, or the solution up to `####` before it."""
    solution, mark, last = text.rpartition("####")
    is_marked = mark and (not solution.strip() or solution.endswith("\n") or any(map(str.isdigit, last)))
    bare = joined_boxes(text) or (last if is_marked else None)
    # other white space than a blank may be the rest of a LaTeX command, see `damage_of_reference`
    return text if bare is None else bare.lstrip(" ").rstrip()


# CodeContests (Li et al. 2022, arXiv 2203.07814), and simpler rows of the same kind: `name`, `description`, and tests
# in `public_tests`, `private_tests`, `generated_tests` or `tests`, each `{input: [...], output: [...]}` or a list of
# `{input, output}`; or lists `input` and `output` in the row itself. All tests are used, each input once. `time_limit`
# is ignored: every problem has the limits of the protocol.

_PUBLISHED_KEYS = ("public_tests", "private_tests", "generated_tests")
"""The published tests may contradict each other if a problem has several right answers; the first test is used."""
_TEST_KEYS = (*_PUBLISHED_KEYS, "tests")
_PYTHON3 = (3, "PYTHON3")
"""Python 3 in `solutions.language`: a number in the published data, a name in exports."""
_CODECONTESTS_INSTRUCTION = """{description}

Write a Python 3 program that solves this problem. It reads the input from standard input and prints the output, and \
nothing else, to standard output. Reply with the whole program in one ```python code block."""


def parse_codecontests(record: Record) -> Problem:
    """The problem of one row."""
    description = record.text("description", "prompt", "question")
    tolerance, any_case = stated_tolerance(description), allows_any_case(description)
    return Problem(
        problem_id=record.identifier("name", "problem_id", "task_id", "id"),
        prompt=_CODECONTESTS_INSTRUCTION.format(description=description.strip()),
        tests=ProgramTests(_cases(record, tolerance, any_case), tolerance, any_case),
        canonical_solution=_canonical_solution(record),
    )


def _cases(record: Record, tolerance: float | None, any_case: bool) -> tuple[ProgramCase, ...]:
    groups = {key: record.fields.get(key) for key in _TEST_KEYS}
    if record.first("input", "output") is not None:
        groups["the row"] = {"input": record.fields.get("input"), "output": record.fields.get("output")}
    cases: dict[str, ProgramCase] = {}
    for key, tests in groups.items():
        for case in _cases_of(tests, key, record):
            first = cases.setdefault(case.stdin, case)
            if key not in _PUBLISHED_KEYS and not outputs_match(case.expected, first.expected, tolerance, any_case):
                raise record.error(f"two tests have the input {case.stdin[:40]!r} and different outputs; remove one")
    if not cases:
        raise record.error(f"{', '.join(_TEST_KEYS)}, 'input' and 'output' contain no test; add one")
    return tuple(cases.values())


def _cases_of(tests: Any, key: str, record: Record) -> list[ProgramCase]:
    """The cases of one group of tests, in either of its two forms."""
    if tests is None:
        return []
    if isinstance(tests, dict):
        inputs, outputs = tests.get("input"), tests.get("output")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise record.error(f"'input' and 'output' of {key} must be two lists of the same length")
        pairs = list(zip(inputs, outputs))
    elif isinstance(tests, list) and all(isinstance(test, dict) for test in tests):
        pairs = [(test.get("input"), test.get("output")) for test in tests]
    else:
        raise record.error(f"{key!r} must be an object of 'input' and 'output' lists, or a list of such pairs")
    if not all(isinstance(text, str) for pair in pairs for text in pair):
        raise record.error(f"every 'input' and 'output' of {key} must be a string")
    return [ProgramCase(stdin, expected) for stdin, expected in pairs]


def _canonical_solution(record: Record) -> str | None:
    """The first published solution in Python 3."""
    solutions = record.fields.get("solutions")
    if solutions is None:
        return record.optional_text("canonical_solution")
    if not isinstance(solutions, dict) or not all(isinstance(solutions.get(k), list) for k in ("language", "solution")):
        raise record.error("'solutions' must be an object of 'language' and 'solution' lists")
    pairs = zip(solutions["language"], solutions["solution"])
    return next((solution for language, solution in pairs if language in _PYTHON3), None)


# The numerical error that a CodeContests problem accepts, according to its text

_UNSTATED_TOLERANCE = 1e-6
"""Used if a problem accepts an error without a readable number."""
_LARGEST_TOLERANCE = 0.01
"""A larger number is a quantity in the problem, unless the sentence names an absolute or relative error."""

_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\be\.g\.)(?<!\bi\.e\.)\s|\n\n")
_REPLACEMENTS = [
    (re.compile(r"\b[A-Z]{2,}\b"), ""),  # ERROR is a word to print
    (re.compile(r"[\u2010-\u2013\u2212]"), "-"),
    (re.compile(r"<sup>|\*\*"), "^"),
    (re.compile(r"\u2264|\\leq?(?:slant)?(?![a-z])|&l[te];=?|<="), "<"),
    (re.compile(r"[${}]|</sup>|\\[()]"), ""),
    (re.compile(r"\s+"), " "),
    # an error to compute, not to accept
    (re.compile(r"\b(?:[Mm]inim[a-z]+|[Ss]mallest|[Ll]owest)(?: [a-z]+){0,3}? errors?\b"), ""),
]
# 10^-6, and "10 - 6" where the markup was lost; 1e-6; 0.000001
_NUMBER = re.compile(
    r"(?<![0-9.])10 ?(?:\^ ?)?\(?- ?(?P<power>[0-9]{1,2})(?![0-9])"
    r"|(?<![0-9.])1(?:\.0)?e-(?P<exponent>[0-9]{1,2})(?![0-9])|(?<![0-9.])(?P<decimal>0\.0*[15])(?![0-9])"
)
_KIND = r"(?:absolute|relative)"
_NAMED_ERROR = re.compile(
    rf"\b{_KIND}(?: ?(?:/|,|or|and)+ ?(?:an? |the )?{_KIND})? (?:errors?|precision|accuracy)\b"
    rf"|\berrors? ?[(,]? ?(?:is |in )?{_KIND}\b"
)
_IS_ACCEPTED = re.compile(r"\b(?:accept|allow|ignor|tolera|permi|(?:correct|right|fine|ok|okay|exceed)\b)")
_BOUND = r"(?:\b(?:exceed|at most|within|below|up to|(?:less|more|greater|smaller|larger) than)\b|<)"
_ALLOWED = r"\b(?:allow|accept|permi|tolera)[a-z]*\b"
_BOUND_START = r" ?(?:of )?(?:10 ?\^? ?\(?-|1(?:\.0)?e-|0\.0)"
_STATED = [
    re.compile(rf"\berrors?\b(?:(?!\bif\b).){{0,60}}?{_BOUND}"),
    re.compile(rf"{_BOUND}.{{0,60}}?\berrors?\b"),
    re.compile(rf"\bdiffers?\b.{{0,80}}?{_BOUND}|\bdifferences?\b.{{0,80}}?{_BOUND}{_BOUND_START}"),
    re.compile(rf"{_ALLOWED}.{{0,30}}?\berrors?\b|\berrors?\b.{{0,30}}?{_ALLOWED}|\btolerance\b"),
    # |a - b| / max(1, b) < 10^-9
    re.compile(r"(?:\|[^|]{1,40}-[^|]{1,40}\||\babs ?\([^()]{1,40}-[^()]{1,40}\)).{0,60}?" + _BOUND + _BOUND_START),
    re.compile(rf"\bwithin{_BOUND_START}.{{0,40}}?\b(?:correct|jury|judge|expected|actual|true|official|reference)\b"),
    # not the accuracy of numbers in the input
    re.compile(
        rf"^(?!.*\b(?:given|input|guaranteed)\b).*\b(?:accura(?:te|cy)|precis(?:e|ion))\b[a-z ]{{0,30}}{_BOUND_START}"
    ),
]


_CASE = r"in (?:any|either|arbitrary) (?:letter )?(?:case|register)\b"
_ANY_CASE = re.compile(
    rf"\byou (?:can|may) (?:print|output|write)\b"
    rf"(?=[^.;]{{0,80}}(?:letter|character|answer\b|yes|no\b|[\"'\u201c\u2018`]))[^.;]{{0,80}}?\b{_CASE}"
    rf"|\b(?:letters?|characters?) (?:can|may) be (?:printed |output )?{_CASE}",
    re.IGNORECASE,
)


def stated_tolerance(description: str) -> float | None:
    """The largest absolute or relative error that the text of a problem accepts.

    Returns:
        The number in the first sentence about the accepted error that has one; `_UNSTATED_TOLERANCE` if a sentence
        names an absolute or relative error without a number; None if there is no such sentence.
    """
    sentences = [_plain(part) for part in _SENTENCE_END.split(description)]
    for sentence in sentences:
        if (number := _tolerance_of(sentence)) is not None:
            return number
    named = (_NAMED_ERROR.search(sentence) and _IS_ACCEPTED.search(sentence) for sentence in sentences)
    return _UNSTATED_TOLERANCE if any(named) else None


def allows_any_case(description: str) -> bool:
    """Whether the text of a problem says that letters may be printed in upper or lower case, as Codeforces does."""
    return _ANY_CASE.search(" ".join(description.split())) is not None


def _plain(sentence: str) -> str:
    for pattern, replacement in _REPLACEMENTS:
        sentence = pattern.sub(replacement, sentence)
    return sentence.lower()


def _tolerance_of(sentence: str) -> float | None:
    named = _NAMED_ERROR.search(sentence)
    if named is None and not any(pattern.search(sentence) for pattern in _STATED):
        return None
    number = _NUMBER.search(sentence, named.end() if named else 0) or _NUMBER.search(sentence)
    if number is None:
        return None
    power = number["power"] or number["exponent"]
    value = float(f"1e-{power}" if power else number["decimal"])
    return value if named or value <= _LARGEST_TOLERANCE else None
