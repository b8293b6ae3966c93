"""Every key of every configuration has its recorded value: the defaults of each stage, and each shipped recipe.

`SNAPSHOT_UPDATE=1 bash tests/run.sh unit tests/unit/test_snapshots_config.py` records the values again, and fails.

`tests/data/snapshots/config/STAGE.json` has all keys of a stage; `recipes.json` has what each recipe changes. The order
of keys is not recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.snapshots import check_snapshot, evaluation_config, flat, recipes_of, run_modules
from verl_ext.config.recipes import find_recipe
from verl_ext.errors import UserError

STAGES = {"sft": "sft", "vlm_sft": "sft", "grpo": "grpo", "budget": "grpo"}
"""The command of each stage."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The output of --print-config by `stage STAGE` (the defaults), `COMMAND`, and `COMMAND/RECIPE`."""
    directory, words = tmp_path_factory.mktemp("recipes"), {}
    for stage, command in STAGES.items():
        (directory / stage).mkdir()
        path = directory / stage / "defaults.yaml"
        path.write_text(f"stage: {stage}\n")
        words[f"stage {stage}"] = [command, f"recipe={path}"]
    for command in ("sft", "grpo"):
        words[command] = [command]
        words |= {f"{command}/{name}": [command, f"recipe={name}"] for name in recipes_of(command)}
    outputs = run_modules([["verl_ext.launch", *each, "--print-config"] for each in words.values()])
    return {name: flat(yaml.safe_load(output)) for name, output in zip(words, outputs)}


def changes(content: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The keys that differ from the defaults; a removed key is `(removed)`, unless it was an empty mapping."""
    changed = {key: value for key, value in content.items() if key not in defaults or differ(value, defaults[key])}
    return changed | {key: "(removed)" for key, value in defaults.items() if key not in content and value != {}}


def differ(one: Any, other: Any) -> bool:
    return repr(one) != repr(other)  # 1, 1.0 and True are equal


@pytest.mark.parametrize("stage", STAGES)
def test_stage_defaults_match_record(printed: dict[str, dict[str, Any]], stage: str) -> None:
    check_snapshot(f"config/{stage}.json", printed[f"stage {stage}"])


def test_recipe_changes_match_record(printed: dict[str, dict[str, Any]]) -> None:
    recipes = {name: content for name, content in printed.items() if "/" in name}
    found = {
        name: {"stage": content["stage"], **changes(content, printed[f"stage {content['stage']}"])}
        for name, content in recipes.items()
    }
    check_snapshot("config/recipes.json", found)


def test_default_recipe_is_quickstart(printed: dict[str, dict[str, Any]]) -> None:
    for command in ("sft", "grpo"):
        assert printed[command] == printed[f"{command}/quickstart"]


def test_variable_sets_default_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_EXT_SFT_RECIPE", "smollm2_135m")
    assert (find_recipe("sft", None).stem, find_recipe("grpo", None).stem) == ("smollm2_135m", "quickstart")
    monkeypatch.setenv("VERL_EXT_SFT_RECIPE", "smolm2_135m")
    with pytest.raises(UserError, match="no recipe 'smolm2_135m' .* did you mean recipe=smollm2_135m"):
        find_recipe("sft", None)


def test_evaluation_configurations_match_record(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}\n")
    defaults = flat(evaluation_config(str(tmp_path / "empty.yaml")))
    recipes = {name: changes(flat(evaluation_config(name)), defaults) for name in recipes_of("eval")}
    check_snapshot("config/eval.json", {"defaults": defaults, "recipes": recipes})
