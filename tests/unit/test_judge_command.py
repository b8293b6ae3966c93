"""`judge`: answers from a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval_pipeline.__main__ import main
from eval_pipeline.judge import client
from eval_pipeline.judge.client import JudgeServer

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = {"problem_id": "p", "prompt": "Add one.", "entry_point": "f", "tests": ["assert f(1) == 2"]}
RIGHT = {"problem_id": "p", "answer": "def f(x):\n    return x + 1\n"}


def judge(directory: Path, answers: list[dict], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command on a problem of ours, unless the arguments name others."""
    (directory / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    (directory / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    problems = () if "--dataset" in arguments else ("--problems", str(directory / "problems.jsonl"))
    output = () if "--output" in arguments else ("--output", str(directory / "verdicts.jsonl"))
    command = [sys.executable, "-m", "eval_pipeline", "judge", "--answers", str(directory / "answers.jsonl")]
    return subprocess.run([*command, *problems, *output, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_an_answer_that_is_not_there_is_an_api_error(tmp_path: Path) -> None:
    """The others are judged."""
    process = judge(tmp_path, [{"problem_id": "p", "answer": None}, RIGHT])
    assert process.returncode == 0, process.stderr
    rows = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [row["error_type"] for row in rows] == ["api_error", "success"]
    assert rows[0]["message"] == "there is no answer"


def test_an_answer_of_another_kind_is_refused(tmp_path: Path) -> None:
    """With its line."""
    process = judge(tmp_path, [RIGHT, {"problem_id": "p", "answer": 5}])
    assert process.returncode == 2 and "line 2 lacks a part; give `problem_id` and `answer` as text" in process.stderr


def test_a_format_of_a_known_data_set_is_refused(tmp_path: Path) -> None:
    """It would do nothing."""
    process = judge(tmp_path, [RIGHT], "--dataset", "humaneval", "--format", "mbpp")
    assert process.returncode == 2 and "--format says how to read --problems" in process.stderr


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    """Before the answers are read."""
    (tmp_path / "file").touch()
    for output, reason in ((tmp_path, "is a directory"), (tmp_path / "file" / "x", "cannot be written")):
        process = judge(tmp_path, [], "--output", str(output))
        assert process.returncode == 2 and reason in process.stderr


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    process = judge(tmp_path, [RIGHT], "--output", str(tmp_path / "answers.jsonl"))
    assert process.returncode == 2 and "would be replaced" in process.stderr
    assert "answer" in (tmp_path / "answers.jsonl").read_text()


def test_unknown_packages_are_refused(tmp_path: Path) -> None:
    """As any key of the recipe."""
    process = judge(tmp_path, [RIGHT], "judge.packages=[no-such-package]")
    assert process.returncode == 2 and "which is not installed" in process.stderr


@pytest.mark.parametrize(("words", "num_workers"), [(["--num-workers", "3"], 3), ([], 2)])
def test_an_option_goes_before_the_recipe_s_number_of_workers(
    words: list[str], num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without either the judge takes one for each processor."""
    asked = []

    class Noted(JudgeServer):
        def __init__(self, isolation: str, workers: int | None, *more: Any) -> None:
            asked.append(workers)
            super().__init__(isolation, workers, *more)

    monkeypatch.setattr(client, "JudgeServer", Noted)
    (tmp_path / "problems.jsonl").write_text(json.dumps(PROBLEM))
    (tmp_path / "answers.jsonl").write_text(json.dumps(RIGHT))
    files = [f"--{name}={tmp_path}/{name}.jsonl" for name in ("problems", "answers")]
    command = ["judge", *files, f"--output={tmp_path}/verdicts.jsonl", *words]
    for of_recipe in ("2", "null"):
        with pytest.raises(SystemExit, match="0"):
            main([*command, f"judge.num_workers={of_recipe}"])
    assert asked == [num_workers, 3 if words else None]


@pytest.mark.parametrize(("output_mb", "error_type"), [("0.001", "wrong_answer"), ("0.01", "success")])
def test_output_is_cut_off_where_the_recipe_says(output_mb: str, error_type: str, tmp_path: Path) -> None:
    """3000 bytes, of which 1048 are within a thousandth of a MiB."""
    cases = [{"input": "", "output": "7" * 3000}]
    problem = {"name": "long", "description": "Print 3000 sevens.", "tests": cases}
    (tmp_path / "long.jsonl").write_text(json.dumps(problem))
    (tmp_path / "answers.jsonl").write_text(json.dumps({"problem_id": "long", "answer": "print('7' * 3000)"}))
    words = ["--problems", f"{tmp_path}/long.jsonl", "--format", "codecontests", "--output", f"{tmp_path}/verdicts"]
    words += ["--answers", f"{tmp_path}/answers.jsonl", f"judge.limits.output_mb={output_mb}"]
    with pytest.raises(SystemExit, match="0"):
        main(["judge", *words])
    assert json.loads((tmp_path / "verdicts").read_text())["error_type"] == error_type
