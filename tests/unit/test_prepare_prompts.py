"""`prompts`: rows in JSON and CSV are converted to verl's RL format without losing types or columns."""

from __future__ import annotations

import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from verl_ext.data.prepare import prepare
from verl_ext.data.prepare.tables import read_parquet, write_parquet
from verl_ext.errors import UserError
from verl_ext.trainer.stages import GRPOConfig, load_config

Row = dict[str, Any]


def converted(tmp_path: Path, rows: list[Row], *options: str, name: str = "train") -> list[Row]:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out"
    words = ["prompts", "--input", str(path), "--output", str(output), "--force", *(options or ("--val-fraction", "0"))]
    prepare(words)
    return [row for _, row in read_parquet(output / f"{name}.parquet")]


def test_converts_full_and_short_rows(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}]
    full = {"prompt": turns, "reward_model": {"ground_truth": "1"}, "data_source": "here", "extra_info": {"level": 2}}
    short = {"prompt": "q", "answer": "1", "level": 2, "system": "s"}
    first, second = converted(tmp_path, [full, short])
    assert first == {
        "data_source": "here",
        "prompt": turns,
        "extra_info": {"problem_id": "mine/1", "level": 2},
        "reward_model": {"style": "rule", "ground_truth": "1"},
        "converted_from": "mine.jsonl row 1",
    }
    assert second["prompt"] == [{"role": "system", "content": "s"}, *turns] and second["data_source"] == "mine"
    assert second["extra_info"] == {"problem_id": "mine/2", "level": 2}
    assert second["reward_model"] == first["reward_model"]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["007", "b"], ["007", "b"]),
        ([1, 2], [1, 2]),
        ([1.0, 2.5], [1.0, 2.5]),
        ([42, 3.5], ["42", "3.5"]),
        ([1, 2**63 - 1], [1, 2**63 - 1]),
        ([1, 2**63], ["1", "9223372036854775808"]),
        ([2**70, 2**70], ["1180591620717411303424"] * 2),
        ([[1, 2], [2.5]], ["[1, 2]", "[2.5]"]),
        ([1, "b"], ["1", "b"]),
        ([["a", "b"], ["c"]], [["a", "b"], ["c"]]),
        ([{"tests": ["x"]}, {"other": 1}], ['{"tests": ["x"]}', '{"other": 1}']),
        ([True, 1], ["true", "1"]),
    ],
)
def test_answers_keep_type_of_file(tmp_path: Path, answers: list[Any], expected: list[Any]) -> None:
    for column in ("answer", "ground_truth"):
        rows = converted(tmp_path, [{"prompt": f"q{index}", column: answer} for index, answer in enumerate(answers)])
        found = [row["reward_model"]["ground_truth"] for row in rows]
        assert found == expected and list(map(type, found)) == list(map(type, expected))


def test_accepts_prompts_without_answer_and_mixed_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "a": {}, "b": [1, "x"], "c": None}, {"prompt": "p", "a": {"d": 1}, "b": [2], "c": 0.5}]
    found = converted(tmp_path, rows)
    assert all(row.get("reward_model") is None for row in found)
    assert [row["extra_info"]["a"] for row in found] == ["{}", '{"d": 1}']
    assert [row["extra_info"]["c"] for row in found] == [None, 0.5]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, 0.5], [1.0, 0.5]),
        ([[1, 0.5], [0]], [[1.0, 0.5], [0.0]]),
        ([2**60 + 1, 1], [2**60 + 1, 1]),
        ([2**60 + 1, 0.5], ["1152921504606846977", "0.5"]),
        ([2**70, 1], ["1180591620717411303424", "1"]),
    ],
)
def test_numbers_of_extra_info_keep_their_values(tmp_path: Path, values: list[Any], expected: list[Any]) -> None:
    found = converted(tmp_path, [{"prompt": f"q{index}", "score": value} for index, value in enumerate(values)])
    assert [row["extra_info"]["score"] for row in found] == expected


def test_object_with_date_is_stored_as_text(tmp_path: Path) -> None:
    write_parquet(tmp_path / "mine.parquet", [{"prompt": "q", "meta": {"created": datetime(2024, 1, 2)}}])
    words = ["--input", str(tmp_path / "mine.parquet"), "--output", str(tmp_path / "out"), "--val-fraction", "0"]
    prepare(["prompts", *words])
    [(_, row)] = read_parquet(tmp_path / "out/train.parquet")
    assert row["extra_info"]["meta"] == '{"created": "2024-01-02 00:00:00"}'


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q"}, "data.prompt_key"),
        ({"prompt": None}, "'prompt' is null; .*--skip-bad"),
        ({"prompt": " "}, "empty"),
        ({"prompt": 4}, "int.*quotes"),
        ({"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "the assistant's"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "'image'"),
        ({"prompt": "q", "images": ["x.png"]}, "images"),
        ({"prompt": "q", "tools": [{"name": "f"}]}, "it has tools, .*system turn"),
        ({"prompt": "q", "tools": '[{"name": "f"}]'}, "it has tools, .*system turn"),
        ({"prompt": "q", "reward_model": {"style": "rule"}}, "no ground_truth"),
        ({"prompt": "q", "reward_model": "1"}, "'reward_model' is not an object"),
        ({"prompt": "q", "level": 1, "extra_info": {"level": 2}}, "'level'"),
    ],
)
def test_bad_row_is_reported_or_skipped(tmp_path: Path, row: Row, reason: str) -> None:
    rows = [{"prompt": "good", "answer": "1"}, row]
    with pytest.raises(UserError, match=rf"mine\.jsonl row 2: .*{reason}"):
        converted(tmp_path, rows)
    assert len(converted(tmp_path, rows, "--skip-bad", "--val-fraction", "0")) == 1


@pytest.mark.parametrize(
    ("answers", "reward"),
    [
        ([42, "1,000"], "reward_correct"),
        ([{"entry_point": "f", "tests": ["f()"]}, {"inputs": ["1"], "outputs": ["2"]}], "code_tests"),
        (["\\frac{\\pi}{2}", "42"], "reward_correct"),
        (["An essay of " + "many words. " * 10, "42"], "path.py:function"),
        ([None, "42"], "path.py:function"),
    ],
)
def test_next_command_has_matching_reward(
    tmp_path: Path, answers: list[Any], reward: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"q{index}", "answer": a}) for index, a in enumerate(answers)))
    prepare(["prompts", "--input", str(path), "--output", str(tmp_path / "out")], is_typed=True)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert {f"reward.functions=[{reward}]", "recipe=custom", "model.partial_pretrain=MODEL"} <= {*words}


@pytest.mark.parametrize(
    ("fraction", "files"),
    [
        ("0.5", {"data.train_files={output}/train.parquet", "data.val_files={output}/val.parquet"}),
        ("0", {"data.train_files={output}/train.parquet", "data.val_files=null"}),
        ("1", {"data.train_files=FILE", "data.val_files={output}/val.parquet"}),
    ],
)
@pytest.mark.parametrize("command", ["chat", "prompts"])
def test_next_command_names_only_written_files(
    tmp_path: Path, command: str, fraction: str, files: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "mine.jsonl", tmp_path / "out"
    path.write_text("\n".join(json.dumps({"prompt": f"q{index}", "answer": f"{index}"}) for index in range(4)))
    prepare([command, "--input", str(path), "--output", str(output), "--val-fraction", fraction], is_typed=True)
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert {word for word in words if "_files=" in word} == {file.format(output=output) for file in files}
    config = load_config("grpo" if command == "prompts" else "sft", [word for word in words if "=" in word])
    if fraction == "0" and isinstance(config, GRPOConfig):
        assert config.data.eval_split == "train"  # the launcher requires data.val_files otherwise


@pytest.mark.parametrize(
    ("names", "sources", "origins"),
    [
        (["train.jsonl", "test.jsonl"], ["train", "test"], ["train.jsonl", "test.jsonl"]),
        (
            ["a/train.jsonl", "b/train.jsonl", "c/d.jsonl"],
            ["a/train", "b/train", "d"],
            ["a/train.jsonl", "b/train.jsonl", "d.jsonl"],
        ),
        (["a/b/x.jsonl", "c/b/x.jsonl"], ["a/b/x", "c/b/x"], ["a/b/x.jsonl", "c/b/x.jsonl"]),
        (["a/x.jsonl", "a/x.json"], ["x", "x#2"], ["x.jsonl", "x.json"]),
        (["a/x.jsonl", "a/x.jsonl"], ["x", "x#2"], ["x.jsonl", "x.jsonl#2"]),
    ],
)
def test_rows_of_files_with_equal_names_have_different_ids(
    names: list[str], sources: list[str], origins: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(json.dumps({"prompt": f"q of {name}", "answer": "1"}))
    prepare(["prompts", "--input", *names, "--output", "out", "--val-fraction", "0"])
    rows = [row for _, row in read_parquet(Path("out/train.parquet"))]
    assert [row["extra_info"]["problem_id"] for row in rows] == [f"{source}/1" for source in sources]
    assert [row["data_source"] for row in rows] == sources
    assert [row["converted_from"] for row in rows] == [f"{origin} row 1" for origin in origins]


def test_same_prompt_stays_in_one_split(tmp_path: Path) -> None:
    rows = [{"question": f"q{index % 5}", "answer": index} for index in range(50)]
    options = ("--prompt-key", "question", "--val-fraction", "0.2")
    sides = [
        {row["prompt"][0]["content"] for row in converted(tmp_path, rows, *options, name=name)}
        for name in ("train", "val")
    ]
    assert sides[0] | sides[1] == {f"q{index}" for index in range(5)} and not sides[0] & sides[1]
