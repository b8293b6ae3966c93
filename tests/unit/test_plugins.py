"""Plugins are found by name, loaded only when named, and rejected with a one-line message."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eval_pipeline.problems import Problem
from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.problems.problem import DatasetSource
from tests.helpers import vlms
from tests.helpers.grpo import MAX_TOKENS, REWARD, rewards_of, sample
from verl_ext.controller.adapters import adapter_for
from verl_ext.errors import UserError
from verl_ext.grpo.rewards.text_environment import TextEnvironment
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import RunContext
from verl_ext.health.history import MetricHistory
from verl_ext.health.rule import Finding, HealthView, Level, Rule
from verl_ext.health.rules import RULES, load_rules
from verl_ext.plugins import Plugin

FILE = """
from dataclasses import dataclass
from pathlib import Path
Path(__file__).with_name("was_run").touch()

@dataclass
class Thing:
    value: int = 7

number = 3
def score(answer): return {"raise": 1 / 0 if answer.text == "raise" else 0, "nan": float("nan")}.get(answer.text, 2)
def parse(record): return record.fields["what"] and None
"""
RULES_FILE = """
from verl_ext.health.rule import Rule
fails = Rule("always_fails", lambda view: 1 / 0, "Never.", "fix it")
untyped = Rule("returns_text", lambda view: "all is well", "Never.", "fix it")
RULES = [fails, untyped]
TWICE = [Rule("loss_rising", lambda view: None, "Never.", "fix it")]
STRANGE = [Rule("for_no_stage", lambda view: None, "Never.", "fix it", frozenset({"sfft"}))]
"""
ADAPTER_FILE = """
from verl_ext.controller.adapters import VLMAdapter
class Partial(VLMAdapter): pass
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's directory with the files above, and `package.mine`, which can be imported."""
    (tmp_path / "package").mkdir()
    for name, text in {
        "mine": FILE,
        "rules": RULES_FILE,
        "adapter": ADAPTER_FILE,
        "broken": "import nothing_here",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "package/mine.py").write_text(FILE)
    monkeypatch.setenv("VERL_EXT_CALLED_FROM", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("text", ["mine.py:Thing", "package.mine:Thing"])
def test_plugin_code_runs_on_load_not_on_parse(mine: Path, text: str) -> None:
    plugin = Plugin.parse(text, "the.key")
    assert not list(mine.rglob("was_run")) and plugin.name == "Thing"
    assert plugin.load()().value == 7
    assert list(mine.rglob("was_run"))


def test_repository_file_is_found_from_other_directory(mine: Path) -> None:
    plugin = Plugin.parse("examples/new_health_rule/memory.py:RULES", "health.rules")
    assert plugin.is_file and [each.name for each in plugin.load()] == ["memory_growing"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mine.py", "the.key is 'mine.py'; write path.py:NAME or package.module:NAME"),
        ("mine.py:not a name", "write path.py:NAME"),
        ("nowhere.py:Thing", "the.key names the file .*nowhere.py, which does not exist"),
        (
            "package.nowhere:Thing",
            "the module 'package.nowhere', which is not found; install it, put .* or write package/nowhere.py:Thing",
        ),
        ("no_package.mine:Thing", "is not found"),
        ("../mine:Thing", r"is not found; .* or write \.\./mine\.py:Thing"),
    ],
)
def test_rejects_missing_plugin_on_parse(mine: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Plugin.parse(text, "the.key")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("broken.py:Thing", "the.key names .*broken.py, which cannot be loaded .ModuleNotFoundError: .*fix it"),
        ("mine.py:Thin", "the.key: .*mine.py has no 'Thin'; it has .*Thing"),
    ],
)
def test_rejects_unloadable_plugin_in_one_line(mine: Path, text: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        Plugin.parse(text, "the.key").load()
    assert "\n" not in str(refused.value)


def test_failing_reward_affects_only_its_sample(mine: Path) -> None:
    environment = TextEnvironment(replace(REWARD, functions=["package.mine:score*0.5", "reward_format"]), MAX_TOKENS, 1)
    good, raised, nan = rewards_of(environment, [sample(text, "") for text in ("good", "raise", "nan")])
    environment.close()
    assert good.components == {"score": 1.0, "reward_format": 0.0} and not good.failures
    assert raised.total is nan.total is None and good.total == 1.0
    assert raised.failures["score"].reason == "ZeroDivisionError: division by zero"
    assert "mine.py" in raised.failures["score"].traceback
    assert "nan" in nan.failures["score"].reason and not nan.failures["score"].timed_out


def refused_number(mine: Path) -> None:
    TextEnvironment(replace(REWARD, functions=["it=package.mine:number"]), MAX_TOKENS, 1)


def refused_format(mine: Path) -> None:
    problems_of(mine, "mine.py:number", '{"what": 1}')


def refused_row(mine: Path) -> None:
    problems_of(mine, "mine.py:parse", '{"else": 1}')


def refused_problem(mine: Path) -> None:
    problems_of(mine, "mine.py:parse", '{"what": 1}')


def refused_list(mine: Path) -> None:
    load_rules(["mine.py:number"], "health.rules")


def refused_name(mine: Path) -> None:
    load_rules(["rules.py:TWICE"], "health.rules")


def refused_stage(mine: Path) -> None:
    load_rules(["rules.py:STRANGE"], "health.rules")


def refused_class(mine: Path) -> None:
    adapter_for(*vlms.idefics3(), (32,), Plugin.parse("mine.py:Thing", "model.adapter"))


def refused_part(mine: Path) -> None:
    adapter_for(*vlms.idefics3(), (32,), Plugin.parse("adapter.py:Partial", "model.adapter"))


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (refused_number, "reward.functions names package.mine:number, which is not a function"),
        (refused_format, "the format of the dataset d is 'mine.py:number', which is not a function"),
        (refused_row, "line 1: mine.py:parse failed .KeyError: 'what'.; correct the row or the function"),
        (refused_problem, "line 1: mine.py:parse returned NoneType instead of a Problem with tests"),
        (refused_list, "health.rules: .*mine.py:number is not a list of rules"),
        (refused_name, "health.rules: two rules are named loss_rising"),
        (
            refused_stage,
            "health.rules: the rule for_no_stage is for the stages sfft; use some of budget, grpo, sft, vlm_sft",
        ),
        (refused_class, "model.adapter names .*mine.py:Thing, which is not a VLMAdapter"),
        (refused_part, "model.adapter names .*adapter.py:Partial, which lacks blocks, decode, encode"),
    ],
)
def test_rejects_plugin_of_wrong_kind(mine: Path, use: Callable[[Path], None], says: str) -> None:
    with pytest.raises(UserError, match=says):
        use(mine)


def problems_of(mine: Path, format: str, row: str) -> list[Problem]:
    """The problems of one row."""
    (mine / "rows.jsonl").write_text(row + "\n")
    return load_problems(DatasetSource("d", format, str(mine / "rows.jsonl")))


PROBLEMS_FILE = """
from eval_pipeline.problems import FunctionTests, Problem, ProgramCase, ProgramTests, ReferenceAnswer
def made(record): return Problem("p7", "Write f.", eval(record.fields["tests"]))
"""


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        ("FunctionTests('f', ())", "has no tests"),
        ("FunctionTests('f', None)", "has no tests"),
        ("ProgramTests(())", "has no tests"),
        ("FunctionTests('f', 'assert f()')", "tests are 'assert f.*, not a tuple"),
        ("FunctionTests('f', ('assert f()', 3))", r"tests\[1\] is 3, not Python source"),
        ("FunctionTests('f', ('',))", r"tests\[0\] is '', not Python source"),
        ("FunctionTests('f', ('assert f(',))", r"tests\[0\] is not Python .SyntaxError"),
        ("FunctionTests('f', ('def test_f(): assert f()',))", r"tests\[0\] defines test_f but never calls it"),
        ("FunctionTests('f', ('assert f()',), preamble=None)", "preamble is None"),
        ("FunctionTests('f', ('assert f()',), code_prompt=1)", "code_prompt is 1"),
        ("FunctionTests('f()', ('assert f()',))", r"entry_point is 'f\(\)'"),
        ("ProgramTests((ProgramCase('1', '2'), ProgramCase(1, 2)))", r"cases\[1\] is ProgramCase"),
        ("ProgramTests((('1', '2'),))", r"cases\[0\] is \('1'"),
        ("ProgramTests((ProgramCase('1', '2'),), tolerance='1e-6')", "tolerance is '1e-6'"),
        ("ReferenceAnswer(42)", "reference answer is 42"),
        ("ReferenceAnswer(' ')", "reference answer is ' '"),
    ],
)
def test_rejects_malformed_tests_of_problem_plugin(mine: Path, tests: str, says: str) -> None:
    """Most of them would crash the judge server."""
    (mine / "made.py").write_text(PROBLEMS_FILE)
    with pytest.raises(UserError, match=f"line 1: made.py:made returned the problem 'p7', .*{says}.*; correct the row"):
        problems_of(mine, "made.py:made", json.dumps({"tests": tests}))


@pytest.mark.parametrize(
    "tests",
    [
        "FunctionTests('f', ['assert f()'], 'import math', 'def f():')",
        "ProgramTests((ProgramCase('', ''),), 1e-6)",
        "ReferenceAnswer('42')",
    ],
)
def test_accepts_tests_of_every_kind(mine: Path, tests: str) -> None:
    (mine / "made.py").write_text(PROBLEMS_FILE)
    [problem] = problems_of(mine, "made.py:made", json.dumps({"tests": tests}))
    assert type(problem.tests).__name__ == tests.partition("(")[0]


def test_failing_rule_becomes_notice(mine: Path) -> None:
    rules = load_rules(["rules.py:RULES"], "health.rules")
    assert [each.name for each in rules] == [*(each.name for each in RULES), "always_fails", "returns_text"]
    fails, untyped = (run_alone(each) for each in rules[-2:])
    assert fails.level == untyped.level == Level.NOTICE
    assert fails.sentence == "the rule itself failed (ZeroDivisionError: division by zero); fix it"
    assert "must return a CheckResult or None, not str" in untyped.sentence


def run_alone(rule: Rule) -> Finding:
    found = rule.run(HealthView(MetricHistory(), RunContext("sft"), HealthLimits()))
    assert found is not None
    return found
