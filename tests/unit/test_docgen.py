"""The generated configuration reference has every key of every stage and of evaluation, with its type."""

from __future__ import annotations

import re

import pytest

from eval_pipeline.config import EvalConfig
from tests.helpers import ROOT
from verl_ext.config.schema import keys, set_at
from verl_ext.docgen import render_health_rules, render_recipes
from verl_ext.errors import UserError
from verl_ext.health.rules import RULES
from verl_ext.trainer.stages import STAGES, load_config

RECIPES = {"sft": ("sft", "quickstart"), "vlm_sft": ("sft", "budget_vlm")}
RECIPES |= {"grpo": ("grpo", "quickstart"), "budget": ("grpo", "budget_controller")}


def test_configuration_page_is_up_to_date() -> None:
    assert (ROOT / "docs/reference/configuration.md").read_text() == render_recipes(), "run `python -m verl_ext.docgen`"


def test_health_rules_page_is_up_to_date() -> None:
    page = (ROOT / "docs/reference/health_rules.md").read_text()
    assert page == render_health_rules(), "run `python -m verl_ext.docgen health_rules`"
    rows = re.findall(r"^\| `(\w+)`(?: \((.+?)\))? \| .+ \|$", page, re.MULTILINE)
    assert [name for name, _ in rows] == [rule.name for rule in RULES]
    assert dict(rows)["loss_not_finite"] == "" and dict(rows)["overfitting"] == "sft, vlm_sft"


@pytest.mark.parametrize("stage", STAGES)
def test_each_key_has_one_row_or_is_listed_without_effect(stage: str) -> None:
    page = render_recipes()
    rows = re.findall(r"^\| `([^`]+)`(?: \(.+?\))? \| `", page, re.MULTILINE)
    unused = re.findall(r"`([\w.]+)=[^`]*`", page.partition("## Keys without effect")[2].partition("\n## ")[0])
    assert len(rows) == len(set(rows))
    assert keys(EvalConfig).keys() <= set(rows)
    for name, key in keys(STAGES[stage].root).items():
        assert name in (unused if key.setting.unused else rows), name


@pytest.mark.parametrize("stage", STAGES)
def test_each_key_has_description_without_period(stage: str) -> None:
    for name, key in keys(STAGES[stage].root).items():
        assert len(key.setting.doc) > 5 and not key.setting.doc.endswith("."), name


@pytest.mark.parametrize("stage", STAGES)
def test_key_without_effect_rejects_other_values(stage: str) -> None:
    command, recipe = RECIPES[stage]
    for name, key in keys(STAGES[stage].root).items():
        if key.setting.unused:
            other = {bool: "true", int: "7", float: "7.5"}.get(type(key.default), "other")
            with pytest.raises(UserError, match=rf"{name}\b.*(has no effect|must be)"):
                load_config(command, [f"recipe={recipe}", f"{name}={other}"])


def test_keys_of_another_stage_are_accepted_at_default() -> None:
    load_config("grpo", ["recipe=quickstart", "data.truncation=error", "data.multiturn.enable=false"])
    with pytest.raises(UserError, match="the command line sets data.truncation, which has no effect in the stage grpo"):
        load_config("grpo", ["recipe=quickstart", "data.truncation=left"])
    config = load_config("grpo", ["recipe=quickstart"])
    with pytest.raises(AssertionError, match="is not a key"):
        set_at(config, "data.truncation", "left")
