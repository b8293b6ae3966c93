"""`eval_pipeline judge`: judging answers from a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from eval_pipeline.__main__ import main
from eval_pipeline.judge import JudgeConfig
from verl_ext.errors import UserError

PROBLEM = {"problem_id": "p", "prompt": "Add one.", "entry_point": "f", "tests": ["assert f(1) == 2"]}
RIGHT = {"problem_id": "p", "answer": "def f(x):\n    return x + 1\n"}
Judge = Callable[..., tuple[int, str]]


@pytest.fixture
def judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Judge:
    """Run the command on one problem by default; returns exit code and standard error."""

    def judge(answers: list[dict], *arguments: str) -> tuple[int, str]:
        (tmp_path / "problems.jsonl").write_text(json.dumps(PROBLEM) + "\n")
        (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
        problems = (
            () if {"--dataset", "--problems"} & {*arguments} else ("--problems", str(tmp_path / "problems.jsonl"))
        )
        output = () if "--output" in arguments else ("--output", str(tmp_path / "verdicts.jsonl"))
        with pytest.raises(SystemExit) as end:
            main(["judge", "--answers", str(tmp_path / "answers.jsonl"), *problems, *output, *arguments])
        return int(end.value.code or 0), capsys.readouterr().err

    return judge


def test_accepts_files_with_byte_order_mark(tmp_path: Path) -> None:
    for name, row in (("problems", PROBLEM), ("answers", RIGHT)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row), encoding="utf-8-sig")
    words = [f"--{name}={tmp_path}/{name}.jsonl" for name in ("problems", "answers")]
    with pytest.raises(SystemExit, match="0"):
        main(["judge", *words, "--output", f"{tmp_path}/verdicts.jsonl"])
    assert json.loads((tmp_path / "verdicts.jsonl").read_text())["error_type"] == "success"


def test_missing_answer_is_api_error(judge: Judge, tmp_path: Path) -> None:
    """The other answers are judged."""
    code, error = judge([{"problem_id": "p", "answer": None}, RIGHT])
    assert code == 0, error
    rows = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [row["error_type"] for row in rows] == ["api_error", "success"]
    assert rows[0]["message"]


def test_rejects_non_text_answer(judge: Judge) -> None:
    """The message names the line and the keys."""
    code, error = judge([RIGHT, {"problem_id": "p", "answer": 5}])
    assert code == 2 and "line 2" in error and "`problem_id` or a text `answer`" in error


def test_rejects_unknown_id_with_suggestion(judge: Judge, tmp_path: Path) -> None:
    """The message suggests the nearest ID, or shows the first one; rows in verl's format are numbered."""
    code, error = judge([RIGHT, {"problem_id": "pp", "answer": "x"}])
    assert code == 2 and "line 2" in error and "did you mean 'p'?" in error
    code, error = judge([{"problem_id": "gsm8k/1", "answer": "x"}])
    assert code == 2 and "'gsm8k/1'" in error and "look like 'p'" in error and "--help" in error
    rows = tmp_path / "verl.jsonl"
    rows.write_text('\n{"prompt": "1 + 1?", "reward_model": {"ground_truth": "2"}}\n')
    words = ("--problems", str(rows), "--format", "verl", "--output", str(tmp_path / "v.jsonl"))
    code, error = judge([{"problem_id": "verl/1", "answer": "2"}], *words)
    assert code == 2 and "look like '2'" in error
    code, error = judge([{"problem_id": 2, "answer": "2"}], *words)
    assert code == 0 and json.loads((tmp_path / "v.jsonl").read_text())["error_type"] == "success", error


def test_rejects_format_of_known_dataset(judge: Judge) -> None:
    """The option would have no effect."""
    code, error = judge([RIGHT], "--dataset", "humaneval", "--format", "mbpp")
    assert code == 2 and "--format" in error and "--problems" in error


def test_rejects_unwritable_output_first(judge: Judge, tmp_path: Path) -> None:
    """The check comes before the answers are read."""
    (tmp_path / "file").touch()
    for output, reason in ((tmp_path, "is a directory"), (tmp_path / "file" / "x", "cannot write")):
        code, error = judge([], "--output", str(output))
        assert code == 2 and reason in error and str(output) in error


def test_rejects_output_that_would_overwrite_input(judge: Judge, tmp_path: Path) -> None:
    code, error = judge([RIGHT], "--output", str(tmp_path / "answers.jsonl"))
    assert code == 2 and "answers.jsonl" in error
    assert "answer" in (tmp_path / "answers.jsonl").read_text()


def test_rejects_unknown_packages(judge: Judge) -> None:
    code, error = judge([RIGHT], "judge.packages=[no-such-package]")
    assert code == 2 and "no-such-package" in error and "not installed" in error


@pytest.mark.parametrize(("words", "num_workers"), [(["--num-workers", "3"], 3), ([], 2)])
def test_workers_option_overrides_recipe(
    words: list[str], num_workers: int, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without either, the judge uses one worker per processor."""
    requested = []

    def note(config: JudgeConfig) -> None:
        requested.append(config.num_workers)
        raise UserError("no server is needed here")

    monkeypatch.setattr("eval_pipeline.judge.JudgeClient", note)
    for in_recipe in ("2", "null"):
        judge([RIGHT], *words, f"judge.num_workers={in_recipe}")
    assert requested == [num_workers, 3 if words else None]


@pytest.mark.parametrize(("output_mb", "is_truncated"), [("0.001", True), ("0.01", False)])
def test_output_is_truncated_at_limit_of_recipe(output_mb: str, is_truncated: bool, tmp_path: Path) -> None:
    """The answer prints 3000 bytes; 0.001 MiB are 1048."""
    code, row = judge_long_output(tmp_path, "7", "print('7' * 3000)", output_mb)
    assert code == 0 and row["error_type"] == "wrong_answer" and ("cut off" in row["message"]) == is_truncated


def test_rejects_expected_output_over_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in `check` and `run`: no answer could be right."""
    assert judge_long_output(tmp_path, "7" * 3000, "print('7' * 3000)", "0.01")[1]["error_type"] == "success"
    assert judge_long_output(tmp_path, "7" * 3000, "print('7' * 3000)", "0.001")[0] == 2
    assert "judge.limits.output_mb" in capsys.readouterr().err


def judge_long_output(tmp_path: Path, expected: str, answer: str, output_mb: str) -> tuple[int, dict]:
    """Judge a program; returns the exit code and the verdict, which is empty if it was not judged."""
    problem = {"name": "long", "description": "Print sevens.", "tests": [{"input": "", "output": expected}]}
    (tmp_path / "long.jsonl").write_text(json.dumps(problem))
    (tmp_path / "answers.jsonl").write_text(json.dumps({"problem_id": "long", "answer": answer}))
    (tmp_path / "verdicts").unlink(missing_ok=True)
    words = ["--problems", f"{tmp_path}/long.jsonl", "--format", "codecontests", "--output", f"{tmp_path}/verdicts"]
    words += ["--answers", f"{tmp_path}/answers.jsonl", f"judge.limits.output_mb={output_mb}"]
    with pytest.raises(SystemExit) as end:
        main(["judge", *words])
    verdicts = tmp_path / "verdicts"
    return int(end.value.code or 0), json.loads(verdicts.read_text()) if verdicts.exists() else {}
