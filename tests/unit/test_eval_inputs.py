"""Problems, checkpoints and run settings: what is read, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from eval_pipeline.checkpoint import find_checkpoint
from eval_pipeline.export import SHARD_INDEX
from eval_pipeline.problems import dataset_name, load_problems
from eval_pipeline.run_config import RunConfig, read_run_config
from verl_ext.errors import UserError

PROBLEM = {"problem_id": "p1", "prompt": "Write f.", "entry_point": "f", "tests": ["assert f() == 1"]}


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def make_export(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "tokenizer.json").write_text("{}")
    (path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    save_file({"w": np.zeros(3, np.float32)}, path / "model.safetensors")
    return path


def test_problems_are_read_in_order_and_limited(tmp_path: Path) -> None:
    second = {**PROBLEM, "problem_id": "p2", "prompt": "two\u2028lines", "family": "maths", "extra": 1}
    path = tmp_path / "quickstart" / "problems.jsonl"
    path.parent.mkdir()
    path.write_text(f"{json.dumps(PROBLEM)}\n\n{json.dumps(second, ensure_ascii=False)}\n")
    problems = load_problems(path)
    assert [(problem.problem_id, problem.family) for problem in problems] == [("p1", None), ("p2", "maths")]
    assert problems[0].tests == ("assert f() == 1",)
    assert load_problems(path, limit=1) == problems[:1]
    assert dataset_name(path) == "quickstart"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is not a JSON object"),
        ({**PROBLEM, "problem_id": 7}, "line 2: 'problem_id'"),
        ({**PROBLEM, "prompt": " "}, "line 2: 'prompt'"),
        ({**PROBLEM, "entry_point": "f()"}, "line 2: 'entry_point'"),
        ({**PROBLEM, "tests": []}, "line 2: 'tests'"),
        ({**PROBLEM, "tests": ["f("]}, r"line 2: tests\[0\] is not python"),
        ({**PROBLEM, "tests": ["f()"]}, r"line 2: tests\[0\] asserts nothing"),
        ({**PROBLEM, "family": 1}, "line 2: 'family'"),
        (PROBLEM, "line 2: problem_id 'p1' occurs twice"),
    ],
)
def test_bad_problem_is_refused_with_its_line(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_problems(write_lines(tmp_path / "problems.jsonl", PROBLEM, line))


def test_problems_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        load_problems(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no problems"):
        load_problems(write_lines(tmp_path / "problems.jsonl", ""))


def test_step_directory_knows_its_export_run_and_output(tmp_path: Path) -> None:
    export = make_export(tmp_path / "run" / "global_step_40" / "huggingface")
    for named in (export.parent, export):
        checkpoint = find_checkpoint(named)
        assert (checkpoint.export, checkpoint.run_dir, checkpoint.step) == (export, tmp_path / "run", 40)
        assert checkpoint.default_output == tmp_path / "run" / "eval" / "eval_step_40"


def test_plain_model_directory_has_no_step(tmp_path: Path) -> None:
    checkpoint = find_checkpoint(make_export(tmp_path / "base"))
    assert (checkpoint.run_dir, checkpoint.step, checkpoint.label) == (None, None, "base")
    assert checkpoint.default_output == tmp_path / "eval_base"


@pytest.mark.parametrize(
    ("name", "message"),
    [("config.json", "no config.json"), ("tokenizer.json", "no tokenizer"), ("model.safetensors", "no .*weights")],
)
def test_export_without_a_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    export = make_export(tmp_path / "base")
    (export / name).unlink()
    with pytest.raises(UserError, match=message):
        find_checkpoint(export)


def test_chat_template_is_required_in_either_place(tmp_path: Path) -> None:
    export = make_export(tmp_path / "base")
    (export / "tokenizer_config.json").write_text("{}")
    with pytest.raises(UserError, match="no chat template"):
        find_checkpoint(export)
    (export / "chat_template.jinja").write_text("{{ messages }}")
    assert find_checkpoint(export).export == export


def test_missing_shard_and_cut_off_shard_are_refused(tmp_path: Path) -> None:
    export = make_export(tmp_path / "base")
    (export / SHARD_INDEX).write_text('{"weight_map": {"w": "model.safetensors", "v": "second.safetensors"}}')
    with pytest.raises(UserError, match="second.safetensors"):
        find_checkpoint(export)
    (export / SHARD_INDEX).unlink()
    weights = export / "model.safetensors"
    for size in (weights.stat().st_size - 4, 3, 0):
        weights.write_bytes(weights.read_bytes()[:size])
        with pytest.raises(UserError, match="model.safetensors"):
            find_checkpoint(export)


def test_missing_directory_and_missing_export_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a directory"):
        find_checkpoint(tmp_path / "none")
    (tmp_path / "global_step_1").mkdir()
    with pytest.raises(UserError, match="hf_model"):
        find_checkpoint(tmp_path / "global_step_1")


def test_run_config_is_read_with_defaults(tmp_path: Path) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    assert read_run_config(None) == RunConfig()
    assert read_run_config(run_dir) == RunConfig(experiment="first")
    (run_dir / "config.yaml").write_text(
        "eval: {problems: data/q/problems.jsonl}\ntrainer: {project_name: demo, experiment_name: sft}\n"
    )
    assert read_run_config(run_dir) == RunConfig(Path("data/q/problems.jsonl"), "demo", "sft")
    (run_dir / "config.yaml").write_text("eval: {problems: null}\n")
    assert read_run_config(run_dir) == RunConfig(experiment="first")


@pytest.mark.parametrize("text", ["eval: [", "- 1\n", "eval: {problems: 3}\n", "eval: {problems: '${nowhere}'}\n"])
def test_broken_run_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match="config.yaml"):
        read_run_config(tmp_path)
