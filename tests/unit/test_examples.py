"""Each example of docs/guides/extending.md runs through the product's own entry points."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval_pipeline.__main__ import main as evaluate
from eval_pipeline.judge import JudgeClient, Submission
from eval_pipeline.problems.datasets import load_problems
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.record import Record
from eval_pipeline.recipe import load_eval_config
from tests.helpers import ROOT, vlms
from tests.helpers.data import question
from tests.helpers.grpo import MAX_TOKENS, REWARD, rewards_of, sample
from tests.helpers.health_curves import write_run
from verl_ext.controller import importance
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.vlm import ControlledModel, load_controller
from verl_ext.data.prepare import prepare
from verl_ext.errors import UserError
from verl_ext.grpo.protocols import Prompt, Trajectory
from verl_ext.grpo.rewards.text_environment import TextEnvironment
from verl_ext.grpo.sampling import Completion
from verl_ext.health.__main__ import main as health
from verl_ext.launch.preflight import check_settings
from verl_ext.plugins import Plugin
from verl_ext.trainer.stages import GRPOConfig, load_config

ADAPTER = "examples/new_adapter/idefics3.py:Idefics3Adapter"
RULES = "examples/new_health_rule/memory.py:RULES"


def test_example_recipes_pass_checks() -> None:
    sft = load_config("sft", ["recipe=examples/new_recipe/conversions.yaml"])
    grpo = load_config("grpo", ["recipe=examples/new_reward/near.yaml"])
    for config in (sft, grpo):
        config.trainer.n_gpus_per_node = 2
        check_settings(config)
    assert (sft.recipe, grpo.recipe) == ("conversions", "near")


def completion(model: Any, tokenizer: Any, prompt: str) -> Trajectory:
    """A completion that a model samples for a prompt."""
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(0)
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=True)[0, inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    prompt = Prompt("drawn", 0, {"reward_model": {"ground_truth": "72"}})
    return Trajectory(prompt, 0).act(Completion(tuple(tokens.tolist()), torch.zeros(len(tokens)), True, text))


def test_example_rewards_score_completions(quickstart: Path) -> None:
    config = load_config("grpo", ["recipe=examples/new_reward/near.yaml"])
    assert isinstance(config, GRPOConfig)
    environment = TextEnvironment(replace(REWARD, functions=config.reward.functions, time_limit_s=5.0), MAX_TOKENS, 1)
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model")
    texts = ("<think>36 * 2</think><answer>72</answer>", "<answer>36</answer>", "seventy-two")
    trajectories = [*(sample(text, "72") for text in texts), completion(model, tokenizer, "How many?")]
    rewards = rewards_of(environment, trajectories)
    environment.close()
    assert not any(each.failures for each in rewards)
    assert [each.components["near"] for each in rewards] == [0.5, 0.25, 0.0, 0.0]
    assert [each.components["brevity"] for each in rewards] == [0.025, 0.025, 0.025, 0.0]  # four tokens, or cut off
    assert rewards[0].components["reward_correct"] == 1.0


def test_example_problem_format_is_loaded_and_judged(tmp_path: Path) -> None:
    recipe = load_eval_config("examples/new_problem_format/doctests.yaml")
    problems = load_problems(recipe.sources["doctests"])
    assert problems[0].tests.tests == ("assert double(2) == 4", "assert double(-1.5) == -3.0")
    right = [Submission(extract_program(each, each.canonical_solution), each.tests) for each in problems]
    with JudgeClient(replace(recipe.judge, num_workers=1)) as judge:
        assert [verdict.error_type for verdict in judge.judge_all(right)] == ["success"] * 3
    words = ["judge", "--recipe", "examples/new_problem_format/doctests.yaml", "--dataset", "doctests"]
    words += ["--answers", "examples/new_problem_format/answers.jsonl", "--output", str(tmp_path / "verdicts.jsonl")]
    with pytest.raises(SystemExit) as left:
        evaluate(words)
    assert left.value.code == 0
    rows = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [row["error_type"] for row in rows] == ["success", "wrong_answer", "api_error"]


def test_page_lists_all_members_of_record() -> None:
    page = (ROOT / "docs/guides/extending.md").read_text()
    _, _, table = page.partition("| member of `Record` |")
    listed = re.findall(r"^\| `(\w+)[`(]", table.partition("\n\n")[0], re.MULTILINE)
    members = {*Record.__dataclass_fields__, *(name for name in vars(Record) if not name.startswith("_"))}
    assert set(listed) == members and len(listed) == len(members)


def test_example_problem_format_gives_grpo_prompts(tmp_path: Path) -> None:
    folder = "examples/new_problem_format"
    words = ["problems", "--format", f"{folder}/doctests.py:parse_problem", "--source", f"{folder}/problems.jsonl"]
    prepare([*words, "--output", str(tmp_path)])
    rows = parquet.read_table(tmp_path / "prompts.parquet").to_pylist()
    assert [row["data_source"] for row in rows] == ["parse_problem"] * 3
    assert json.loads(rows[0]["reward_model"]["ground_truth"])["entry_point"] == "double"


def test_invalid_problem_row_is_named(tmp_path: Path) -> None:
    recipe = load_eval_config("examples/new_problem_format/doctests.yaml")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"name": "f", "task": "Do.", "examples": ">>> f(1)\\n"}\n')
    with pytest.raises(UserError, match="rows.jsonl, line 1: 'examples' must be >>> lines, each followed by"):
        load_problems(replace(recipe.sources["doctests"], path=str(path)))


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `model/` and `train.parquet`."""
    directory = tmp_path_factory.mktemp("idefics3")
    for part in vlms.idefics3():
        part.save_pretrained(directory / "model")
    image = {"bytes": question(0).image, "path": None}
    row = {"image": image, "question": "what is it ?", "answers": ["a cat"] * 10}
    parquet.write_table(pa.Table.from_pylist([row]), directory / "train.parquet")
    return directory


def test_example_adapter_answers_at_several_settings(idefics3: Path) -> None:
    controlled = ControlledModel(str(idefics3 / "model"), (32, 64, 128), 3, adapter=ADAPTER)
    runner = controlled.runner("cpu", torch.float32, Plugin.parse(ADAPTER, "--adapter"))
    space, asked = runner.adapter.space(1, 4), question(0)
    settings = [space.configuration(tier, blocks) for tier in range(3) for blocks in ([True] * 4, [True, False] * 2)]
    outcomes = [runner.run(asked, each) for each in settings]
    patches = [each.workload.num_patches for each in outcomes]
    assert patches == sorted(patches) and len(set(patches)) == 3
    assert all(each.latency.vision_ms > 0 and each.latency.num_decoded <= 2 for each in outcomes)
    assert len(runner.features(asked)[0]) == 32


def test_adapter_named_by_export_needs_confirmation(idefics3: Path, tmp_path: Path) -> None:
    vlm = ControlledModel(str(idefics3 / "model"), (32, 64), 3, adapter=ADAPTER).to_dict()
    config = BudgetControllerConfig(("low", "high"), 4, 1, 4, vision_width=32, language_width=32, vlm=vlm)
    BudgetController(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"was trained with the adapter {ADAPTER}; pass --adapter"):
        load_controller(tmp_path)[1].runner("cpu", torch.float32)


def test_example_adapter_works_in_measuring_commands(
    idefics3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["importance", "--model", str(idefics3 / "model"), "--questions", str(idefics3), "--num-questions", "1"]
    words += ["--tier-sizes", "32", "64", "--output", str(tmp_path / "importance.json")]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as left:
        importance.main()
    assert left.value.code == 2
    monkeypatch.setattr(sys, "argv", [*words, "--adapter", ADAPTER])
    importance.main()
    assert set(json.loads((tmp_path / "importance.json").read_text())["importance_scores"]) == {"1", "2", "3"}


def growing_run(run_dir: Path, growth: float) -> Path:
    """A run whose peak memory grows by `growth` GiB per step."""
    write_run(run_dir, "a textbook run")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rows = [{**row, "system/peak_memory_gib": 1.0 + growth * row["step"]} for row in lines]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_dir


@pytest.mark.parametrize(("growth", "level"), [(0.002, "warning"), (0.0, "ok")])
def test_example_health_rule_checks_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], growth: float, level: str
) -> None:
    run_dir = growing_run(tmp_path, growth)
    assert health([str(run_dir), "--extra-rules", RULES, "--json"]) == 0
    found = {each["rule"]: each for each in json.loads(capsys.readouterr().out)["rules"]}
    assert found["memory_growing"]["level"] == level and "loss_not_finite" in found
    assert health([str(run_dir), "--json"]) == 0
    assert "memory_growing" not in capsys.readouterr().out
