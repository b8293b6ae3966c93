"""The Chinese advice of the health rules."""

from __future__ import annotations

import ast
import inspect
import re

from verl_ext.health import rules
from verl_ext.health.rules import RULES
from verl_ext.monitor.advice import ADVICE, translate_advice


def test_all_advice_of_built_in_rules_is_in_chinese() -> None:
    calls = [node for node in ast.walk(ast.parse(inspect.getsource(rules))) if isinstance(node, ast.keyword)]
    below = {ast.literal_eval(each.value) for each in calls if each.arg == "advice_below"}
    assert {*ADVICE} == {rule.advice for rule in RULES} | below and len(below) == 1
    assert all(re.search("[\u4e00-\u9fff]", text) for text in ADVICE.values())
    for english, chinese in ADVICE.items():  # the keys and files that it names are the same
        assert {*re.findall(r"\w+\.\w+(?:\.\w+)*", english)} == {*re.findall(r"[a-z_]+\.\w+(?:\.\w+)*", chinese)}


def test_advice_is_translated_at_the_end_of_a_sentence() -> None:
    [jitter] = [rule for rule in RULES if rule.name == "loss_jitter"]  # it has a semicolon
    assert translate_advice("zh", f"it varies; by 2; {jitter.advice}") == f"it varies; by 2；{ADVICE[jitter.advice]}"
    assert translate_advice("en", f"it varies; {jitter.advice}") == f"it varies; {jitter.advice}"
    assert translate_advice("zh", "it varies; my own advice") == "it varies; my own advice"
