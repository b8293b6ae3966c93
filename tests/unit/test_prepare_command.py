"""The preparation command: stamp, atomic writes, exit codes, and light imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers.faults import fill, small_disk
from verl_ext.data.prepare import COMMANDS, is_prepared, prepare
from verl_ext.data.prepare.command import STAMP_NAME, staged_file
from verl_ext.errors import UserError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    rows = [{"prompt": f"p{index}", "response": f"r{index}"} for index in range(20)]
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(map(json.dumps, rows)))
    return ["chat", "--input", str(source), "--output", str(tmp_path / "out")]


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verl_ext.data.prepare", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_is_prepared_requires_same_arguments_version_and_files(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_prepared(arguments)
    prepare(arguments)
    assert is_prepared(arguments)
    assert is_prepared([*arguments, "--val-fraction", "0.02"]), "a default that is written out changes nothing"
    assert not is_prepared([*arguments, "--seed", "1"])
    with monkeypatch.context() as patch:
        patch.setitem(COMMANDS, "chat", replace(COMMANDS["chat"], version=99))
        assert not is_prepared(arguments)
    (tmp_path / "out" / "val.parquet").unlink()
    assert not is_prepared(arguments)


@pytest.mark.parametrize("content", ["[]", "3", "[" * 100_000, "{}"])
def test_damaged_stamp_counts_as_missing(content: str, arguments: list[str], tmp_path: Path) -> None:
    """The command runs again."""
    prepare(arguments)
    (tmp_path / "out" / STAMP_NAME).write_text(content)
    assert not is_prepared(arguments)


@pytest.mark.parametrize("states", [None, 3, {"": None}, {"": [1]}, {"": [1, 2, 3]}, {"": [1, 2, "no digits"]}])
def test_stamp_with_damaged_digests_counts_as_missing(states: object, arguments: list[str], tmp_path: Path) -> None:
    prepare(arguments)
    stamp = tmp_path / "out" / STAMP_NAME
    content = json.loads(stamp.read_text())
    for inputs in (states, dict.fromkeys(content["inputs"], states)):
        stamp.write_text(json.dumps({**content, "inputs": inputs}))
        assert not is_prepared(arguments)


def rewrite(path: Path, old: str, new: str) -> None:
    """Change a file without changing its size and modification time."""
    before = path.stat()
    path.write_text(path.read_text().replace(old, new))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def test_input_is_reread_only_if_size_or_time_changed(arguments: list[str], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    assert "Prepared: " in run_command(*arguments).stdout
    rewrite(source, "p0", "q0")
    assert "Nothing to do: " in run_command(*arguments).stdout
    rewrite(source, "q0", "p0")
    os.utime(source)
    assert "Nothing to do: " in run_command(*arguments).stdout
    rewrite(source, "p0", "q0")
    assert "Nothing to do: " in run_command(*arguments).stdout, "the stamp has the new time"
    rewrite(source, "q0", "p0")
    rewrite(source, "p0", "q0")
    os.utime(source)
    assert "in.jsonl changed since" in run_command(*arguments).stdout


@pytest.mark.parametrize("output", ["out", "."])
def test_directory_input_changes_with_content_of_files(output: str, tmp_path: Path) -> None:
    """Not with their times, nor with the command's own output or unreadable files."""
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 2?", "answer": "It is 3.\\n#### 3"}\n')
    words = ["gsm8k", "--source", str(tmp_path), "--output", str(tmp_path / output)]
    assert "Prepared: " in run_command(*words).stdout
    for name in ("__pycache__/x.pyc", ".git/index", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "unreadable").symlink_to("/proc/self/mem")
    for name in ("train", "test"):
        os.utime(tmp_path / f"{name}.jsonl")
    assert "Nothing to do: " in run_command(*words).stdout
    rewrite(tmp_path / "test.jsonl", "1 + 2", "2 + 1")
    assert "Nothing to do: " in run_command(*words).stdout, "the stamp has the new times"
    os.utime(tmp_path / "test.jsonl")
    assert " changed since" in run_command(*words).stdout
    assert "Nothing to do: " in run_command(*words).stdout
    (tmp_path / "more").write_text("x")
    assert " changed since" in run_command(*words).stdout


def test_second_run_does_nothing_unless_forced(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(arguments)
    made = (tmp_path / "out" / "train.parquet").stat().st_ino
    capsys.readouterr()
    prepare(arguments)
    assert "Nothing to do: " in capsys.readouterr().out
    assert (tmp_path / "out" / "train.parquet").stat().st_ino == made
    prepare([*arguments, "--force"])
    assert "Nothing to do: " not in capsys.readouterr().out
    assert is_prepared(arguments)


def test_failed_preparation_leaves_no_stamp(arguments: list[str], tmp_path: Path) -> None:
    prepare(arguments)
    (tmp_path / "in.jsonl").write_text("no json\n")
    with pytest.raises(UserError, match="row 1"):
        prepare([*arguments, "--force"])
    assert not is_prepared(arguments)


def test_rejected_preparation_leaves_no_directory(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("no json\n")
    with pytest.raises(UserError, match="row 1"):
        prepare(arguments)
    assert not (tmp_path / "out").exists()


def test_truncated_stamp_counts_as_missing(arguments: list[str], tmp_path: Path) -> None:
    prepare(arguments)
    stamp = tmp_path / "out" / "prepared.json"
    stamp.write_text(stamp.read_text()[:30])
    assert not is_prepared(arguments)


def test_interrupted_write_keeps_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), staged_file(target) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_staged_file_is_readable_as_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with staged_file(tmp_path / "model.safetensors") as temporary:
            temporary.touch(mode=0o600)
    finally:
        assert os.umask(before) == 0o027
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640


def test_output_below_file_raises_user_error(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(UserError, match="cannot create the directory"):
        prepare(arguments)


def test_full_disk_raises_user_error(arguments: list[str], tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        (disk / "out").mkdir()
        fill(disk)
        with pytest.raises(UserError, match=r"cannot write to .*disk/out \(.*No space left on device\)"):
            prepare([*arguments[:-1], str(disk / "out")])
        assert list((disk / "out").iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [
        ["chat"],
        ["bake"],
        ["quickstart", "--output", "x", "--samples", "7"],
        ["chat", "--input", "x", "--output", "x", "--val-fraction", "2"],
    ],
)
def test_mistake_exits_with_2_and_no_traceback(words: list[str]) -> None:
    result = run_command(*words)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_that_parses(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        is_prepared([name, "--help"])
    assert exit_info.value.code == 0
    example = " ".join(capsys.readouterr().out.split()).split("examples: python -m verl_ext.data.prepare ")[1]
    assert not is_prepared(example.partition(" exit codes:")[0].split())


def test_is_prepared_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from verl_ext.data.prepare import is_prepared\n"
        "is_prepared(['quickstart', '--output', 'nowhere'])\n"
        "heavy = 'torch transformers pandas datasets pyarrow numpy PIL jinja2 eval_pipeline'.split()\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_quickstart_model_fits_its_data(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = ["quickstart", "--samples", "500", "--output", str(tmp_path)]
    prepare(arguments)
    assert is_prepared(arguments)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert (tmp_path / "model" / "merges.txt").is_file()
    assert tokenizer.chat_template
    problems = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert {"problem_id", "family", "prompt", "entry_point", "tests", "canonical_solution"} == problems[0].keys()
    chat = ["chat", "--input", str(tmp_path / "train.parquet"), "--tokenizer", str(tmp_path / "model")]
    prepare([*chat, "--output", str(tmp_path / "again")])
    made, measured = (json.loads((path / "prepared.json").read_text()) for path in (tmp_path, tmp_path / "again"))
    assert measured["counts"]["tokens_max"] == made["counts"]["max_tokens"]
