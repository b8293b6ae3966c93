"""`chat`: formats, checks, duplicates, exclusion, the split and what parquet must not alter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from verl_ext.data.prepare import prepare
from verl_ext.data.prepare.files import read_parquet, write_jsonl, write_parquet
from verl_ext.data.prepare.lengths import length_percentiles
from verl_ext.errors import UserError

Row = dict[str, Any]


def chat(question: str, answer: str = "yes") -> list[Row]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def run_chat(tmp_path: Path, rows: list[Any], *options: str) -> tuple[list[Row], list[Row], dict[str, float]]:
    write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out"
    prepare(["chat", "--input", str(tmp_path / "in.jsonl"), "--output", str(output), *options])
    train, val = ([row for _, row in read_parquet(output / f"{name}.parquet")] for name in ("train", "val"))
    return train, val, json.loads((output / "prepared.json").read_text())["counts"]


def test_messages_and_pairs_give_the_same_rows(tmp_path: Path) -> None:
    pairs = [{"question": f"q{index}", "answer": "yes", "topic": index} for index in range(100)]
    chats = [{"conversations": chat(f"q{index}"), "topic": index} for index in range(100)]
    train, val, counts = run_chat(tmp_path, pairs)
    assert (len(train), len(val)) == (98, 2)
    assert train[0].keys() == {"messages", "topic"}
    assert train == run_chat(tmp_path, chats)[0]
    assert counts["chars_max"] == len("q99yes")


def test_named_columns_go_before_the_usual_ones(tmp_path: Path) -> None:
    rows = [{"prompt": "no", "ask": f"q{index}", "say": "yes", "messages": chat("no")} for index in range(3)]
    train, val, _ = run_chat(tmp_path, rows, "--prompt-key", "ask", "--response-key", "say")
    assert sorted(row["messages"][0]["content"] for row in train + val) == ["q0", "q1", "q2"]
    assert train[0]["prompt"] == "no"


def test_parquet_and_jsonl_are_read_together(tmp_path: Path) -> None:
    write_parquet(tmp_path / "more.parquet", [{"messages": chat(f"m{index}"), "extra": 1} for index in range(5)])
    write_jsonl(tmp_path / "in.jsonl", [{"messages": chat(f"q{index}")} for index in range(5)])
    files = [str(tmp_path / name) for name in ("in.jsonl", "more.parquet")]
    prepare(["chat", "--input", *files, "--output", str(tmp_path)])
    rows = [row for name in ("train", "val") for _, row in read_parquet(tmp_path / f"{name}.parquet")]
    assert sorted(row["messages"][0]["content"][0] for row in rows) == ["m"] * 5 + ["q"] * 5
    assert {row["extra"] for row in rows} == {1, None}


def test_duplicates_are_dropped_but_not_other_answers(tmp_path: Path) -> None:
    rows = [{"messages": chat("a")}, {"messages": chat("a")}, {"messages": chat("a", "no")}, {"messages": chat("b")}]
    train, val, counts = run_chat(tmp_path, rows)
    assert len(train + val) == 3
    assert counts["duplicate"] == 1


@pytest.mark.parametrize("text", ["1\n\n7\n", '{"problem_id": 1}\n{"problem_id": "7"}\n'])
def test_excluded_ids_are_dropped(tmp_path: Path, text: str) -> None:
    (tmp_path / "held.txt").write_text(text)
    rows = [{"messages": chat(f"q{index}"), "problem_id": index} for index in range(10)]
    train, val, counts = run_chat(tmp_path, rows, "--exclude", str(tmp_path / "held.txt"))
    assert sorted(row["problem_id"] for row in train + val) == [0, 2, 3, 4, 5, 6, 8, 9]
    assert counts["excluded"] == 2


def test_exclusion_without_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("1\n")
    rows = [{"messages": chat(f"q{index}"), "id": index} for index in range(10)]
    with pytest.raises(UserError, match="problem_id"):
        run_chat(tmp_path, rows, "--exclude", str(tmp_path / "held.txt"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read --exclude"),
        ("\n \n", "holds no id; remove the option"),
        ('{"id": 3}\n', "line 1 is no JSON object with 'problem_id'"),
        ("7\n{broken\n", "line 2 is no JSON object"),
    ],
)
def test_a_list_of_ids_that_says_nothing_is_refused(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "held.txt").write_text(content)
    rows = [{"messages": chat(f"q{index}"), "problem_id": index} for index in range(10)]
    with pytest.raises(UserError, match=reason):
        run_chat(tmp_path, rows, "--exclude", str(tmp_path / "held.txt"))


def test_lengths_are_those_of_a_tokenizer_that_is_given(quickstart: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat(f"q{index}")} for index in range(10)]
    counts = run_chat(tmp_path, rows, "--tokenizer", str(quickstart / "model"))[2]
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    assert counts["tokens_max"] == max(len(tokenizer.apply_chat_template(row["messages"])) for row in rows)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "none": "is not a directory",
        "empty": "no tokenizer that loads",
        "bare": "no chat template",
    }.items():
        with pytest.raises(UserError, match=reason):
            run_chat(tmp_path, rows, "--tokenizer", str(tmp_path / name))


def test_ids_may_stand_in_another_column(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text('{"name": "n3"}\n')
    rows = [{"messages": chat("q", str(index)), "name": f"n{index // 5}"} for index in range(50)]
    options = ("--exclude", str(tmp_path / "held.txt"), "--id-key", "name", "--val-fraction", "0.2")
    train, val, counts = run_chat(tmp_path, rows, *options)
    assert counts["excluded"] == 5 and len(train) + len(val) == 45
    assert val and not {row["name"] for row in train} & {row["name"] for row in val}


def test_answers_to_one_problem_stay_on_one_side(tmp_path: Path) -> None:
    rows = [{"messages": chat("q", str(index)), "problem_id": index // 5} for index in range(100)]
    train, val, _ = run_chat(tmp_path, rows, "--val-fraction", "0.1")
    assert len(val) == 10
    assert not {row["problem_id"] for row in train} & {row["problem_id"] for row in val}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([1], "list"),
        ({"messages": "text"}, "not a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant"),
        ({"messages": chat("q", "  ")}, "empty assistant"),
        ({"messages": chat("q", None)}, "NoneType"),
        ({"text": "x"}, "--messages-key"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tmp_path: Path, bad: Any, reason: str) -> None:
    rows = [{"messages": chat("a")}, bad, {"messages": chat("b")}]
    with pytest.raises(UserError, match=rf"in\.jsonl row 2.*{reason}"):
        run_chat(tmp_path, rows)
    train, val, counts = run_chat(tmp_path, rows, "--skip-bad")
    assert len(train + val) == 2
    assert counts["bad"] == 1


def test_a_call_of_a_tool_needs_no_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    train, val, _ = run_chat(tmp_path, [{"messages": [chat(f"q{index}")[0], call]} for index in range(2)])
    assert train[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "f"


def test_tools_of_different_shape_are_kept_as_text(tmp_path: Path) -> None:
    tools = [[{"name": "f", "parameters": {name: {"type": "string"}}}] for name in ("x", "y")]
    rows = [{"messages": chat(f"q{index}"), "tools": tools[index % 2]} for index in range(4)]
    train, val, _ = run_chat(tmp_path, rows)
    assert sorted(row["tools"] for row in train + val) == sorted(json.dumps(tools[index % 2]) for index in range(4))
    same = [{"messages": chat(f"q{index}"), "tools": tools[0]} for index in range(4)]
    assert run_chat(tmp_path, same, "--force")[0][0]["tools"] == tools[0]


def test_a_file_that_is_no_parquet_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("text")
    with pytest.raises(UserError, match=r"x\.parquet"):
        prepare(["chat", "--input", str(tmp_path / "x.parquet"), "--output", str(tmp_path / "out")])


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    """The rows that are left out would be lost."""
    path = tmp_path / "train.parquet"
    write_parquet(path, [{"messages": chat(f"q{index}")} for index in range(4)])
    before = path.read_bytes()
    with pytest.raises(UserError, match="would be replaced"):
        prepare(["chat", "--input", str(path), "--output", str(tmp_path)])
    assert path.read_bytes() == before


def test_lengths_are_told_by_some_that_occur() -> None:
    rows = [{"messages": [{"role": "user", "content": "x" * count}]} for count in (10, 1, 3, 2, 9, 5, 4, 8, 7, 6)]
    assert length_percentiles(rows, None) == {"chars_p50": 5, "chars_p90": 9, "chars_p99": 10, "chars_max": 10}
    assert set(length_percentiles(rows[6:7], None).values()) == {4} and length_percentiles([], None) == {}


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800", "response": "x"}', "[" * 100_000, '{"prompt": '])
def test_hostile_lines_are_bad_rows_and_a_byte_order_mark_is_none(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"prompt": f"p{index}", "response": "r"}) for index in range(2)]
    path.write_text("\n".join([*good, line]), encoding="utf-8-sig")
    words = ["chat", "--input", str(path), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"rows\.jsonl.* 3\b"):
        prepare(words)
    prepare([*words, "--skip-bad"])
    assert json.loads((tmp_path / "out/prepared.json").read_text())["counts"]["bad"] == 1
