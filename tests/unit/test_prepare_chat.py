"""`chat`: formats, checks, duplicates, exclusion, the split, and values that parquet must not alter."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from transformers import AutoTokenizer

from tests.helpers.data import dataset_of
from verl_ext.data.prepare import prepare
from verl_ext.data.prepare.chat import count_chars, length_percentiles
from verl_ext.data.prepare.tables import read_parquet, write_jsonl, write_parquet
from verl_ext.errors import UserError

Row = dict[str, Any]
ANSWER = {"role": "assistant", "content": "yes"}


def chat(question: str, answer: str = "yes") -> list[Row]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def run_chat(tmp_path: Path, rows: list[Any], *options: str) -> tuple[list[Row], list[Row], dict[str, float]]:
    write_jsonl(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out"
    prepare(["chat", "--input", str(tmp_path / "in.jsonl"), "--output", str(output), *options])
    train, val = ([row for _, row in read_parquet(output / f"{name}.parquet")] for name in ("train", "val"))
    return train, val, json.loads((output / "prepared.json").read_text())["counts"]


def test_messages_and_pairs_give_same_rows(tmp_path: Path) -> None:
    pairs = [{"question": f"q{index}", "answer": "yes", "topic": index} for index in range(100)]
    chats = [{"conversations": chat(f"q{index}"), "topic": index} for index in range(100)]
    train, val, counts = run_chat(tmp_path, pairs)
    assert (len(train), len(val)) == (98, 2)
    assert train[0].keys() == {"messages", "topic", "converted_from"}
    assert train == run_chat(tmp_path, chats)[0]
    assert counts["chars_max"] == len("q99yes")


def test_named_columns_override_defaults(tmp_path: Path) -> None:
    rows = [{"prompt": "no", "ask": f"q{index}", "say": "yes", "messages": chat("no")} for index in range(3)]
    named = ("--prompt-key", "ask", "--response-key", "say")
    with pytest.raises(UserError, match="'prompt'.*--metadata prompt"):
        run_chat(tmp_path, rows, *named)
    train, val, _ = run_chat(tmp_path, rows, *named, "--metadata", "prompt", "messages")
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


def test_drops_duplicates_but_keeps_different_answers(tmp_path: Path) -> None:
    rows = [{"messages": chat("a")}, {"messages": chat("a")}, {"messages": chat("a", "no")}, {"messages": chat("b")}]
    train, val, counts = run_chat(tmp_path, rows)
    assert len(train + val) == 3
    assert counts["duplicate"] == 1


@pytest.mark.parametrize("text", ["1\n\n7\n", '\ufeff{"problem_id": 1, "text": "\u2028"}\r\n{"problem_id": "7"}\n'])
def test_excluded_ids_are_dropped(tmp_path: Path, text: str) -> None:
    (tmp_path / "held.txt").write_text(text)
    rows = [{"messages": chat(f"q{index}"), "problem_id": index} for index in range(10)]
    train, val, counts = run_chat(tmp_path, rows, "--exclude", str(tmp_path / "held.txt"))
    assert sorted(row["problem_id"] for row in train + val) == [0, 2, 3, 4, 5, 6, 8, 9]
    assert counts["excluded"] == 2


def test_rejects_exclusion_without_ids(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("1\n")
    rows = [{"messages": chat(f"q{index}"), "id": index} for index in range(10)]
    with pytest.raises(UserError, match="problem_id"):
        run_chat(tmp_path, rows, "--exclude", str(tmp_path / "held.txt"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read --exclude"),
        ("\n \n", "contains no id; remove the option"),
        ('{"id": 3}\n', "line 1 is not a JSON object with 'problem_id'"),
        ("7\n{broken\n", "line 2 is not a JSON object"),
        pytest.param('{"a":' * 100_000, "line 1 is not a JSON object", id="nested"),
    ],
)
def test_rejects_invalid_list_of_ids(tmp_path: Path, content: str | None, reason: str) -> None:
    if content is not None:
        (tmp_path / "held.txt").write_text(content)
    rows = [{"messages": chat(f"q{index}"), "problem_id": index} for index in range(10)]
    with pytest.raises(UserError, match=reason):
        run_chat(tmp_path, rows, "--exclude", str(tmp_path / "held.txt"))


def test_lengths_are_counted_with_given_tokenizer(quickstart: Path, tmp_path: Path) -> None:
    rows = [{"messages": chat(f"q{index}")} for index in range(10)]
    counts = run_chat(tmp_path, rows, "--tokenizer", str(quickstart / "model"))[2]
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    chats = [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows]
    assert counts["tokens_max"] == max(map(len, chats))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "bare")
    (tmp_path / "empty").mkdir()
    for name, reason in {
        "none": "is not a directory",
        "empty": "cannot be loaded",
        "bare": "no chat template",
    }.items():
        with pytest.raises(UserError, match=reason):
            run_chat(tmp_path, rows, "--tokenizer", str(tmp_path / name))


NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
TOOLS = (
    "{% for t in tools or [] %}{% for k in t.function.parameters.keys() %}{{ k }}{% endfor %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{% for k, v in call.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}<|im_end|>\n{% endfor %}"
)


def tokenizer_with(quickstart: Path, directory: Path, template: str) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory / "tokenizer")
    return directory / "tokenizer"


def test_row_rejected_by_template_is_reported_or_skipped(quickstart: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(quickstart, tmp_path, NO_SYSTEM)
    rows = [{"messages": chat(f"q{index}")} for index in range(4)]
    rows[2]["messages"] = [{"role": "system", "content": "S"}, *rows[2]["messages"]]
    with pytest.raises(UserError, match=r"in\.jsonl row 3: .*no system role.*--skip-bad"):
        run_chat(tmp_path, rows, "--tokenizer", str(tokenizer))
    train, val, counts = run_chat(tmp_path, rows, "--tokenizer", str(tokenizer), "--skip-bad")
    assert len(train + val) == 3 and counts["bad"] == 1


def test_lengths_of_tool_calls_match_training(quickstart: Path, tmp_path: Path) -> None:
    """Both from the source file and from the converted one, whose tools and arguments are JSON text."""
    tokenizer = tokenizer_with(quickstart, tmp_path, TOOLS)
    rows = []
    for name in ("x", "y", "z"):
        call = {"type": "function", "function": {"name": "f", "arguments": {name: 1}}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {name: {"type": "integer"}}}}]
        rows.append({"messages": [chat(name)[0], answer], "tools": tools})
    train, _, counts = run_chat(tmp_path, rows, "--tokenizer", str(tokenizer))
    assert isinstance(train[0]["tools"], str)
    dataset = dataset_of(train, AutoTokenizer.from_pretrained(tokenizer), tmp_path)
    assert counts["tokens_max"] == max(dataset.lengths)
    words = ["chat", "--input", str(tmp_path / "out/train.parquet"), "--tokenizer", str(tokenizer)]
    prepare([*words, "--val-fraction", "0", "--output", str(tmp_path / "again")])
    assert json.loads((tmp_path / "again/prepared.json").read_text())["counts"]["tokens_max"] == counts["tokens_max"]


def test_changed_input_is_prepared_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "held.txt").write_text("none\n")
    rows = [{"messages": chat(f"q{index}"), "problem_id": index} for index in range(4)]
    options = ("--exclude", str(tmp_path / "held.txt"))
    made = run_chat(tmp_path, rows, *options)
    assert run_chat(tmp_path, rows, *options) == made  # written again, with the same content
    assert "Nothing to do" in capsys.readouterr().out
    assert run_chat(tmp_path, [*rows, {"messages": chat("q"), "problem_id": 4}], *options)[2]["read"] == 5
    assert "in.jsonl changed" in capsys.readouterr().out
    (tmp_path / "held.txt").write_text("0\n")
    assert run_chat(tmp_path, rows, *options)[2]["excluded"] == 1
    stamp = tmp_path / "out/prepared.json"
    stamp.write_text(
        json.dumps({key: value for key, value in json.loads(stamp.read_text()).items() if key != "inputs"})
    )
    assert run_chat(tmp_path, rows[:3], *options)[2]["read"] == 3
    (tmp_path / "in.jsonl").unlink()
    prepare(["chat", "--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), *options])
    assert "Nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, ANSWER],
        [{"role": "developer", "content": "d"}, {"role": "user", "content": "q"}, ANSWER],
        [{"role": "user", "content": ""}, {**ANSWER, "reasoning_content": "r"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}],
        [{"role": "user", "content": "q", "name": "n"}, {**ANSWER, "id": 1, "index": 2}],
        [ANSWER],
        [ANSWER, {"role": "user", "content": "q"}],
        [{"role": "user", "content": "q"}, {**ANSWER, "weight": 0}],
        [{"role": "user", "content": "q"}, {**ANSWER, "weight": 1}],
        [{"role": "user", "content": None}, ANSWER],
        [{"role": "user", "content": "q"}],
    ],
)
def test_prepared_rows_are_exactly_those_training_accepts(turns: list[Row], quickstart: Path, tmp_path: Path) -> None:
    """Rows that preparation rejects are also rejected by training."""
    tokenizer = AutoTokenizer.from_pretrained(quickstart / "model")
    tokenizer.chat_template = TOOLS + "{# reasoning_content #}"
    try:
        [row] = converted(tmp_path, "in.jsonl", json.dumps({"messages": turns}))
    except UserError:
        with pytest.raises(UserError, match="row 0 cannot be used"):
            dataset_of([{"messages": turns}], tokenizer, tmp_path)
    else:
        assert len(dataset_of([row], tokenizer, tmp_path)) == 1


def test_ids_may_be_in_another_column(tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text('{"name": "n3"}\n')
    rows = [{"messages": chat("q", str(index)), "name": f"n{index // 5}"} for index in range(50)]
    options = ("--exclude", str(tmp_path / "held.txt"), "--id-key", "name", "--val-fraction", "0.2")
    train, val, counts = run_chat(tmp_path, rows, *options)
    assert counts["excluded"] == 5 and len(train) + len(val) == 45
    assert val and not {row["name"] for row in train} & {row["name"] for row in val}


def test_answers_to_one_problem_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"messages": chat("q", str(index)), "problem_id": index // 5} for index in range(100)]
    train, val, _ = run_chat(tmp_path, rows, "--val-fraction", "0.1")
    assert len(val) == 10
    assert not {row["problem_id"] for row in train} & {row["problem_id"] for row in val}


@pytest.mark.parametrize("before", [[], [{"role": "system", "content": "Be brief."}]])
def test_answers_to_one_prompt_stay_in_one_split(tmp_path: Path, before: list[Row]) -> None:
    rows = [{"messages": [*before, *chat(f"q{index % 5}", f"a{index}")]} for index in range(50)]
    sides = run_chat(tmp_path, rows, "--val-fraction", "0.2")[:2]
    questions = [{row["messages"][len(before)]["content"] for row in side} for side in sides]
    assert questions[0] | questions[1] == {f"q{index}" for index in range(5)} and not questions[0] & questions[1]
    _, val, _ = run_chat(tmp_path, rows[:40:5])  # all have one prompt
    assert len(val) == 1


def test_few_ids_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": chat(f"q{index}"), "problem_id": index % 2} for index in range(40)]
    _, val, _ = run_chat(tmp_path, rows)
    assert len(val) == 20
    assert re.search(r"20 of 40 rows are held out .*requested 2%.* same problem_id", capsys.readouterr().out)
    run_chat(tmp_path, rows[:9], "--id-key", "other")
    assert "held out" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"all 20 rows have the same problem_id \(--id-key\)"):
        run_chat(tmp_path, rows[::2])


UNPREFERRED = {"chosen": "yes", "rejected": "no"}


@pytest.mark.parametrize(
    ("row", "reason", "option"),
    [
        ({"prompt": "q", **UNPREFERRED}, "data.response_key=chosen", "--response-key"),
        ({"prompt": chat("q")[:1], "chosen": [ANSWER], "rejected": [ANSWER]}, "response_key=chosen", "--response-key"),
        ({"prompt": "q", "chosen": chat("q"), "rejected": chat("q")}, "messages_key=chosen", "--messages-key"),
        ({"chosen": chat("q"), "rejected": chat("q")}, "messages_key=chosen", "--messages-key"),
    ],
)
def test_preference_data_train_on_chosen_answers(tmp_path: Path, row: Row, reason: str, option: str) -> None:
    with pytest.raises(UserError, match=f"preferences is not supported; .*{option} chosen .*{reason}"):
        run_chat(tmp_path, [row])
    write_jsonl(tmp_path / "in.jsonl", [row])
    output = ["--output", str(tmp_path), "--val-fraction", "0"]
    prepare(["chat", "--input", str(tmp_path / "in.jsonl"), *output, option, "chosen"])
    [(_, converted_row)] = read_parquet(tmp_path / "train.parquet")
    assert converted_row["messages"] == chat("q")


def test_origins_of_files_with_equal_names_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        write_jsonl(Path(folder, "train.jsonl"), [{"messages": chat(folder)}])
    prepare(["chat", "--input", "a/train.jsonl", "b/train.jsonl", "--output", "out", "--val-fraction", "0"])
    origins = [row["converted_from"] for _, row in read_parquet(Path("out/train.parquet"))]
    assert origins == ["a/train.jsonl row 1", "b/train.jsonl row 1"]


@pytest.mark.parametrize(
    ("column", "good", "bad"),
    [
        *(
            (column, *pair)
            for column in ("label", "kto_tag")
            for pair in ((True, False), ("True", "False"), ("1", " FALSE"))
        ),
        *(("kto_tag", *pair) for pair in ((1, 0), (1.0, 0.0), ("1", "0"), ("1", "0.0"))),
    ],
)
def test_answers_labeled_as_bad_are_rejected(tmp_path: Path, column: str, good: Any, bad: Any) -> None:
    rows = [{"prompt": f"q{index}", "completion": "yes", column: bad if index % 2 else good} for index in range(6)]
    found = str(bad).strip().lower()
    with pytest.raises(UserError, match=f"row 2: its column '{column}' is {found},.*--skip-bad.*--metadata {column}"):
        run_chat(tmp_path, rows)
    train, val, counts = run_chat(tmp_path, rows, "--skip-bad")
    assert counts["bad"] == 3 and [row[column] for row in train + val] == [good] * 3
    train, val, _ = run_chat(tmp_path, rows, "--metadata", column)
    assert len(train + val) == 6


def test_label_of_class_zero_is_no_verdict(tmp_path: Path) -> None:
    train, val, _ = run_chat(
        tmp_path, [{"prompt": f"q{label}", "response": "yes", "label": label} for label in range(3)]
    )
    assert len(train + val) == 3


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([1], "list"),
        ({"messages": "text"}, "not a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "robot"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant"),
        ({"messages": chat("q", "  ")}, "empty assistant"),
        ({"messages": chat("q", None)}, "NoneType"),
        ({"text": "x"}, "'messages' is missing"),
    ],
)
def test_bad_row_is_reported_or_skipped(tmp_path: Path, bad: Any, reason: str) -> None:
    rows = [{"messages": chat("a")}, bad, {"messages": chat("b")}]
    with pytest.raises(UserError, match=rf"in\.jsonl row 2.*{reason}"):
        run_chat(tmp_path, rows)
    train, val, counts = run_chat(tmp_path, rows, "--skip-bad")
    assert len(train + val) == 2
    assert counts["bad"] == 1


def test_tool_call_needs_no_text(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    train, val, _ = run_chat(tmp_path, [{"messages": [chat(f"q{index}")[0], call]} for index in range(2)])
    assert train[0]["messages"][1]["tool_calls"][0]["function"]["name"] == "f"


def test_tools_of_different_schema_are_stored_as_text(tmp_path: Path) -> None:
    tools = [[{"name": "f", "parameters": {name: {"type": "string"}}}] for name in ("x", "y")]
    rows = [{"messages": chat(f"q{index}"), "tools": tools[index % 2]} for index in range(4)]
    train, val, _ = run_chat(tmp_path, rows)
    assert sorted(row["tools"] for row in train + val) == sorted(json.dumps(tools[index % 2]) for index in range(4))
    same = [{"messages": chat(f"q{index}"), "tools": tools[0]} for index in range(4)]
    assert run_chat(tmp_path, same, "--force")[0][0]["tools"] == tools[0]


def test_invalid_parquet_raises_user_error(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("text")
    with pytest.raises(UserError, match=r"x\.parquet"):
        prepare(["chat", "--input", str(tmp_path / "x.parquet"), "--output", str(tmp_path / "out")])


def test_rejects_overwriting_input(tmp_path: Path) -> None:
    """Otherwise the rows that are left out would be lost."""
    path = tmp_path / "train.parquet"
    write_parquet(path, [{"messages": chat(f"q{index}")} for index in range(4)])
    before = path.read_bytes()
    with pytest.raises(UserError, match="would be overwritten"):
        prepare(["chat", "--input", str(path), "--output", str(tmp_path)])
    assert path.read_bytes() == before


def test_length_percentiles_are_observed_values() -> None:
    lengths = [10, 1, 3, 2, 9, 5, 4, 8, 7, 6]
    assert length_percentiles(lengths, "chars") == {"chars_p50": 5, "chars_p90": 9, "chars_p99": 10, "chars_max": 10}
    assert set(length_percentiles([4], "chars").values()) == {4} and length_percentiles([], "chars") == {}
    assert count_chars({"messages": [{"content": "ab"}, {"content": None}, {"content": "c"}]}) == 3


@pytest.mark.parametrize("line", ['{"prompt": "\\ud800", "response": "x"}', "[" * 100_000, "9" * 5000, '{"prompt": '])
def test_hostile_lines_are_bad_rows_but_bom_is_accepted(line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps({"prompt": f"p{index}", "response": "r"}) for index in range(2)]
    path.write_text("\n".join([*good, line]), encoding="utf-8-sig")
    words = ["chat", "--input", str(path), "--output", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"rows\.jsonl.* 3\b"):
        prepare(words)
    prepare([*words, "--skip-bad"])
    assert json.loads((tmp_path / "out/prepared.json").read_text())["counts"]["bad"] == 1


def converted(tmp_path: Path, name: str, content: str | bytes) -> list[Row]:
    """The rows of one file, converted without a split."""
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    output = tmp_path / "converted"
    prepare(["chat", "--input", str(tmp_path / name), "--output", str(output), "--val-fraction", "0", "--force"])
    assert not (output / "val.parquet").exists()
    return [row for _, row in read_parquet(output / "train.parquet")]


SYSTEM, USER, ASSISTANT = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant"))
TEXT_PART = {"type": "text", "text": "u"}
CALL = {"name": "f", "arguments": {"x": 1, "y": None}}
CALLED = {"type": "function", "function": {"name": "f", "arguments": json.dumps(CALL["arguments"])}}


@pytest.mark.parametrize(
    ("row", "layout", "messages"),
    [
        ({"messages": [USER, ASSISTANT], "system": "s"}, "OpenAI layout (messages, system)", [SYSTEM, USER, ASSISTANT]),
        (
            {"instruction": "i", "input": "x", "output": "a", "text": "Below: i / x / a"},
            "Alpaca layout (instruction, input, output)",
            [{"role": "user", "content": "i\n\nx"}, ASSISTANT],
        ),
        (
            {"instruction": "u", "input": "", "output": "a", "system": "s", "history": [["u", "a"]]},
            "Alpaca layout (instruction, input, system, history, output)",
            [SYSTEM, USER, ASSISTANT, USER, ASSISTANT],
        ),
        (
            {"instruction": "i", "context": "x", "response": "a", "category": "qa"},
            "Alpaca layout (instruction, context, response)",
            [{"role": "user", "content": "i\n\nx"}, ASSISTANT],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "u", "weight": 0.0},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "t"},
                    {"from": "gpt", "value": "a", "weight": 1},
                ]
            },
            "ShareGPT layout (conversations)",
            [
                SYSTEM,
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALLED]},
                {"role": "tool", "content": "t"},
                ASSISTANT,
            ],
        ),
        (
            {"messages": [{**SYSTEM, "content": [{"type": "text", "text": "s"}]}, USER, ASSISTANT], "system": "s"},
            "OpenAI layout (messages, system)",
            [SYSTEM, USER, ASSISTANT],
        ),
        ({"prompt": "u", "completion": "a"}, "prompt/completion layout (prompt, completion)", [USER, ASSISTANT]),
        ({"prompt": [USER], "completion": [ASSISTANT]}, "prompt/completion layout", [USER, ASSISTANT]),
        ({"system_prompt": "s", "question": "u", "response": "a"}, "question/response", [SYSTEM, USER, ASSISTANT]),
        (
            {"messages": [{**SYSTEM, "role": "developer"}, {**USER, "content": [TEXT_PART]}, ASSISTANT]},
            "developer turns became system turns in 1 rows",
            [SYSTEM, USER, ASSISTANT],
        ),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": CALL}]}]}, "OpenAI", None),
        ({"messages": [{**USER, "tool_calls": []}, {**ASSISTANT, "tool_calls": []}]}, "OpenAI", [USER, ASSISTANT]),
    ],
)  # fmt: skip
def test_converts_known_layouts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Row, layout: str, messages: list[Row] | None
) -> None:
    [found] = converted(tmp_path, "in.jsonl", json.dumps(row))
    assert f"in.jsonl: {layout}" in capsys.readouterr().out
    turns = [{key: value for key, value in turn.items() if value is not None} for turn in found["messages"]]
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            assert call == CALLED, "with its null, which a column of parquet would not keep"
    assert messages is None or turns == messages


PAIR = {"prompt": "p", "response": "r"}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({**PAIR, "response_2": "other"}, r"'response_2'.*--metadata response_2"),
        ({**PAIR, "images": [{"path": "x.png"}]}, "images, but only text"),
        ({**PAIR, "image": "x.png"}, "image, but only text"),
        ({**PAIR, "rejected": [USER, ASSISTANT]}, "'rejected'"),
        ({**PAIR, "messages": [USER, ASSISTANT]}, "'messages'"),
        ({**PAIR, "system": "s", "system_prompt": "t"}, "'system' differs"),
        ({"prompt": [{**SYSTEM, "content": {}}, USER], "response": "r", "system": "s"}, "'system' differs"),
        ({"prompt": "p", "response": 4}, "int.*quotes"),
        ({"prompt": "p"}, "'response' is missing"),
        ({"instruction": "i", "output": "o"}, r"Alpaca layout \(instruction, output\).*prompt/response"),
        ({"messages": [USER, ASSISTANT]}, "OpenAI layout.*prompt/response.*separate file"),
        ({"prompt": [USER, {"role": "user", "content": [{"type": "image_url"}]}], "response": "r"}, "'image_url'"),
        ({"prompt": [SYSTEM, {**SYSTEM, "role": "developer"}, USER], "response": "r"}, "both system and developer"),
        ({"prompt": "p", "response": [{**ASSISTANT, "weight": 0}]}, "'weight'; drop the row"),
        ({"prompt": [ASSISTANT, USER], "response": "r"}, "begins with the assistant"),
        ({"prompt": "p", "response": [{"role": "assistant", "tool_calls": ["f(x)"]}]}, "tool call"),
        ({**PAIR, "history": "earlier"}, "'history'"),
        ({**PAIR, "tools": "f"}, "'tools'"),
        ({"prompt": [USER], "response": [ASSISTANT], "system": "", "notes": "more"}, "'notes' is not part"),
        ({"prompt": [USER], "response": [ASSISTANT], "system": "s", "notes": "s and more"}, "'notes' is not part"),
        ('{"prompt": "p", "prompt": "q", "response": "r"}', "'prompt' occurs twice"),
    ],
)
def test_rejects_row_whose_text_would_be_lost(tmp_path: Path, row: Row | str, reason: str) -> None:
    lines = [json.dumps(PAIR), row if isinstance(row, str) else json.dumps(row)]
    for name, content in {"in.jsonl": "\n".join(lines), "in.json": f"[{','.join(lines)}]"}.items():
        with pytest.raises(UserError, match=rf"{name} row 2: .*{reason}"):
            converted(tmp_path, name, content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("in.json", json.dumps([PAIR, PAIR | {"prompt": "q"}], indent=1)),
        ("in.jsonl", "\ufeff" + "\r\n\r\n".join(map(json.dumps, [PAIR, PAIR | {"prompt": "q"}]))),
        ("in.json", "\n".join(map(json.dumps, [PAIR, PAIR | {"prompt": "q"}]))),
        ("in.csv", '\ufeffprompt,response\r\np,r\r\n\r\n"q",r\r\n'),
        ("in.tsv", "prompt\tresponse\np\tr\nq\tr\n"),
    ],
)
def test_reads_supported_file_formats(tmp_path: Path, name: str, content: str) -> None:
    compressed = f"{name}.gz", gzip.compress(content.encode())
    for each in ((name, content), compressed):
        assert [row["messages"][0]["content"] for row in converted(tmp_path, *each)] == ["p", "q"]
    for damaged in (b"{}", compressed[1][:-9]):
        with pytest.raises(UserError, match="cannot decompress .* compress it again"):
            converted(tmp_path, compressed[0], damaged)


TURNS = [{"role": "user", "content": "it's u"}, {"role": "assistant", "content": "a"}]
SHAREGPT_TURNS = [{"from": "human", "value": "it's u"}, {"from": "gpt", "value": "a"}]


@pytest.mark.parametrize("turns", [TURNS, SHAREGPT_TURNS])
@pytest.mark.parametrize("write", [json.dumps, partial(json.dumps, indent=1), lambda turns: f"\n {json.dumps(turns)} "])
def test_turns_in_csv_are_json(tmp_path: Path, write: Callable[[Any], str], turns: list[Row]) -> None:
    rows = [{"prompt": write(turns[:1]), "completion": write(turns[1:])}]
    pd.DataFrame(rows).to_csv(tmp_path / "in.csv", index=False)
    [row] = converted(tmp_path, "in.csv", (tmp_path / "in.csv").read_text())
    assert row["messages"] == TURNS


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": TURNS[:1], "completion": TURNS[1:]},
        {"prompt": [dict(reversed(TURNS[0].items()))], "completion": "a"},
        {"messages": TURNS},
        {"conversations": SHAREGPT_TURNS},
    ],
)
def test_turns_in_notation_of_python_are_rejected(tmp_path: Path, columns: Row) -> None:
    """As pandas writes them to CSV files; they would become the text of a turn."""
    pd.DataFrame([columns]).to_csv(tmp_path / "in.csv", index=False)
    with pytest.raises(UserError, match=r"row 1: it has turns as text that is not JSON .*; store them as JSON"):
        converted(tmp_path, "in.csv", (tmp_path / "in.csv").read_text())


@pytest.mark.parametrize(
    "answer",
    [
        [{"name": "Bob", "role": "engineer"}],
        [{"role": "user", "login": "bob"}],
        [{"role": "engineer", "content": "x"}],
        [{"role": "user", "content": "x"}, {"id": 1}],
        [{"from": "Paris", "to": "Rome"}],
    ],
)
def test_answer_of_objects_with_role_is_text(tmp_path: Path, answer: list[Row]) -> None:
    [row] = converted(tmp_path, "in.jsonl", json.dumps({"prompt": "List all.", "completion": json.dumps(answer)}))
    assert [turn["content"] for turn in row["messages"]] == ["List all.", json.dumps(answer)]


def test_turns_as_text_with_unknown_role_are_rejected(tmp_path: Path) -> None:
    turns = json.dumps([{"role": "user", "content": "u"}, {"role": "bot", "content": "a"}])
    with pytest.raises(UserError, match="'bot'"):
        converted(tmp_path, "in.jsonl", json.dumps({"prompt": turns, "completion": "a"}))


@pytest.mark.parametrize("repeats", [1, 2])
def test_pandas_index_in_csv_is_ignored(tmp_path: Path, repeats: int) -> None:
    frame = pd.DataFrame({"prompt": ["p", "q", "r"], "response": ["r"] * 3}).iloc[[0, 2]]
    for _ in range(repeats):
        frame.to_csv(tmp_path / "in.csv")
        frame = pd.read_csv(tmp_path / "in.csv")
    rows = converted(tmp_path, "in.csv", (tmp_path / "in.csv").read_text())
    assert [row["messages"][0]["content"] for row in rows] == ["p", "r"]
    assert rows[0].keys() == {"messages", "converted_from"}


def test_unnamed_column_of_text_is_rejected(tmp_path: Path) -> None:
    for header in (",prompt,response", "Unnamed: 0,prompt,response"):
        with pytest.raises(UserError, match="row 2: its column '.*' is not part .*--metadata '.*'"):
            converted(tmp_path, "in.csv", f"{header}\n0,p,r\nmore,q,r\n")
    with pytest.raises(UserError, match="row 1: its column '' is not part"):
        converted(tmp_path, "in.csv", "prompt,response,\np,r,5\n")


def test_directory_is_rejected_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").touch()
    with pytest.raises(UserError, match=r"is a directory; list its files, such as \S+/a.jsonl.gz$"):
        prepare(["chat", "--input", str(tmp_path), "--output", str(tmp_path / "out")])
    (tmp_path / "state.json").touch()
    with pytest.raises(UserError, match=r"save_to_disk wrote it; convert it with .*to_parquet"):
        prepare(["chat", "--input", str(tmp_path), "--output", str(tmp_path / "out")])


def test_text_is_kept_verbatim(tmp_path: Path) -> None:
    """Unicode line breaks, numbers in CSV and long fields are unchanged."""
    text = "a\u2028b\u2029c\x85d"
    [row] = converted(tmp_path, "in.jsonl", json.dumps({**PAIR, "prompt": text}, ensure_ascii=False))
    assert row["messages"][0]["content"] == text and row["converted_from"] == "in.jsonl row 1"
    long = "x" * 200_000
    rows = converted(tmp_path, "in.csv", f'instruction,input,output\n"a ""b"",\nc",,007\n{long},2.50,1e3\n')
    assert [[turn["content"] for turn in row["messages"]] for row in rows] == [
        ['a "b",\nc', "007"],
        [f"{long}\n\n2.50", "1e3"],
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("in.jsonl", "", "contains no rows"),
        ("in.jsonl", " \n\n", "contains no rows"),
        ("in.json", "[]", "contains no rows"),
        ("in.csv", "prompt,response\n", "contains no rows"),
        ("in.csv", "prompt;response\np;r\n", "commas"),
        ("in.csv", "prompt,prompt,response\np,q,r\n", "two columns named 'prompt'"),
        ("in.csv", "prompt,response\np,r,s\n", "row 1: it has 3 fields"),
        ("in.csv", 'prompt,response\n"p,r\n', "as CSV"),
        ("in.csv", "prompt,response\np,é\n".encode("latin-1"), "save it as UTF-8"),
        ("in.json", '[{"prompt": "p", "response": "r"} {}]', "after row 1"),
        ("in.json", '[{"prompt": "p", "response": "r"}, {]', "from row 2 on"),
        ("in.json", '{"data": []}', "row 1: its columns data contain no known conversation layout"),
        ("in.jsonl", '{"instrution": "p", "output": "r"}', "rename 'instrution' to 'instruction', or specify them"),
        (
            "in.jsonl",
            '{"messages": [{"role": "user", "contnt": "p"}]}',
            "row 1: turn 1 has no content, but the unknown key 'contnt'; rename the key to 'content'",
        ),
        ("in.jsonl", '{"text": "once"}', "only plain text, and training needs chats; split each text"),
    ],
)
def test_rejects_unreadable_file(tmp_path: Path, name: str, content: str | bytes, reason: str) -> None:
    with pytest.raises(UserError, match=f"{name}.*{reason}"):
        converted(tmp_path, name, content)


def test_single_row_cannot_be_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data.val_files=null"):
        run_chat(tmp_path, [PAIR])
    assert len(converted(tmp_path, "in.jsonl", json.dumps(PAIR))) == 1


def test_column_stored_as_text_may_contain_dates(tmp_path: Path) -> None:
    write_parquet(tmp_path / "dated.parquet", [{**PAIR, "meta": {"created": datetime(2024, 1, 2)}}])
    write_jsonl(tmp_path / "in.jsonl", [{**PAIR, "prompt": "q", "meta": {}}])
    files = [str(tmp_path / name) for name in ("dated.parquet", "in.jsonl")]
    prepare(["chat", "--input", *files, "--output", str(tmp_path / "out"), "--val-fraction", "0"])
    rows = [row for _, row in read_parquet(tmp_path / "out/train.parquet")]
    assert [row["meta"] for row in rows] == ['{"created": "2024-01-02 00:00:00"}', "{}"]


def test_extra_columns_may_mix_types_and_be_empty(tmp_path: Path) -> None:
    rows = [{**PAIR, "id": 1, "meta": {}}, {**PAIR, "prompt": "q", "id": "a", "meta": None}]
    found = converted(tmp_path, "in.jsonl", "\n".join(map(json.dumps, rows)))
    assert [(row["id"], row["meta"]) for row in found] == [("1", "{}"), ("a", None)]
