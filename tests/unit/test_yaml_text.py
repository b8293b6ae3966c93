"""YAML files with aliases: their expansion is bounded, wherever a file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from eval_pipeline.recipe import load_eval_config
from verl_ext.config.compose import load_yaml
from verl_ext.config.run_config import read_config_file
from verl_ext.errors import UserError
from verl_ext.health.context import read_run_config
from verl_ext.trainer.stages import load_config

READERS: dict[str, Callable[[Path], object]] = {
    "recipe": lambda path: load_config("sft", [f"recipe={path}"]),
    "config.yaml": read_config_file,
    "health": read_run_config,
    "evaluation": lambda path: load_eval_config(str(path)),
}
NESTED = ["a: &a [x, x, x, x, x, x, x, x, x]"]
NESTED += [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in zip("abcdefghij", "bcdefghijk")]
BAD = {
    "billions": ("\n".join(NESTED), "more than 100,000 values"),
    "itself": ("data: &data\n  inner: *data\n", "contains itself"),
    "deep": ("data: " + "[" * 5000 + "]" * 5000, "recursion|nested"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("reader", READERS)
def test_rejects_yaml_that_cannot_be_expanded(reader: str, bad: str, tmp_path: Path) -> None:
    path = tmp_path / "some.yaml"
    text, names = BAD[bad]
    path.write_text(text)
    with pytest.raises(UserError, match=f"{path}.*{names}"):
        READERS[reader](path)


def test_aliases_of_ordinary_files_are_expanded(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("defaults: &defaults {lr: 1}\nothers: [*defaults, *defaults]\nmerged: {<<: *defaults, more: 2}\n")
    assert load_yaml(path) == {
        "defaults": {"lr": 1},
        "others": [{"lr": 1}, {"lr": 1}],
        "merged": {"lr": 1, "more": 2},
    }
