"""The reference of recipe keys: each key has a row, each sentence a key, and a key without effect is refused."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_ext.config.checks import check_values
from verl_ext.config.compose import base_config, compose_config
from verl_ext.config.overrides import leaves
from verl_ext.errors import UserError
from verl_ext.launch.budget_check import check_budget
from verl_ext.launch.grpo_check import check_grpo
from verl_ext.launch.vlm_check import check_vlm_sft
from verl_ext.reference import training
from verl_ext.reference.comments import comments_of
from verl_ext.reference.evaluation import evaluation_entries
from verl_ext.reference.training import CHOICES, KINDS_OF_NULL, STAGES, WITHOUT_EFFECT, entries_of, sentences_of

RECIPES = {"sft": ("sft", "quickstart"), "grpo": ("grpo", "quickstart")}
RECIPES |= {"budget": ("grpo", "budget_controller"), "vlm_sft": ("sft", "budget_vlm")}
CHECKS = {"grpo": partial(check_grpo, world_size=1), "budget": check_budget, "vlm_sft": check_vlm_sft}


@pytest.mark.parametrize("stage", STAGES)
def test_every_key_of_a_stage_is_told_once(stage: str) -> None:
    keys = set(leaves(base_config(stage)))
    assert keys == entries_of(stage).keys() | (WITHOUT_EFFECT[stage].keys() & keys)
    assert WITHOUT_EFFECT[stage].keys() <= keys


def test_no_sentence_and_no_kind_is_left_over() -> None:
    keys = {key for stage in STAGES for key in leaves(base_config(stage))}
    for stage in STAGES:
        assert sentences_of(stage).keys() <= keys
    assert KINDS_OF_NULL.keys() <= {key for stage in STAGES for key in entries_of(stage)}


def test_a_key_without_a_sentence_or_a_kind_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sentences = {key: text for key, text in sentences_of("sft").items() if key != "trainer.seed"}
    with monkeypatch.context() as patch:
        patch.setattr(training, "sentences_of", lambda stage: sentences)
        with pytest.raises(KeyError, match="trainer.seed"):
            entries_of("sft")
    monkeypatch.delitem(KINDS_OF_NULL, "model.external_lib")
    with pytest.raises(KeyError, match="model.external_lib"):
        entries_of("sft")


def test_a_comment_belongs_to_the_value_on_its_line(tmp_path: Path) -> None:
    path = tmp_path / "defaults.yaml"
    path.write_text(
        "# of the file\na: 1  # the first\nb:\n  # of what follows\n  c: 'x # y'  # the second: with a colon\n"
        "  d: [1, 2]  # a list\n  e: {}  # empty\n  f: ${a}\ng: null # last\n"
    )
    found = {"a": "the first", "b.c": "the second: with a colon", "b.d": "a list", "b.e": "empty", "g": "last"}
    assert comments_of(path) == found


@pytest.mark.parametrize("stage", STAGES)
def test_keys_without_effect_are_refused_with_another_value(stage: str) -> None:
    command, recipe = RECIPES[stage]
    composed = compose_config(command, [f"recipe={recipe}"])
    for key, value in WITHOUT_EFFECT[stage].items():
        assert OmegaConf.select(composed, key) == value, key
        config = deepcopy(composed)
        OmegaConf.update(config, key, another(key, value, stage))
        with pytest.raises(UserError, match=f"{key} has no effect"):
            check_values(config)
            CHECKS[stage](config)


def another(key: str, value: Any, stage: str) -> Any:
    """A value that a key does not have, and could have elsewhere."""
    if key in CHOICES[stage]:
        return next(choice for choice in CHOICES[stage][key] if choice != value)
    if isinstance(value, bool):
        return not value
    return value + 7 if isinstance(value, int) else value + 0.5 if isinstance(value, float) else "another"


def test_an_evaluations_keys_are_told() -> None:
    entries = evaluation_entries()
    assert entries["judge.limits.cpu_s"].sentence.startswith("processor seconds of one test")
    assert entries["engine.kind"].kind == "`vllm`, `openai`"
