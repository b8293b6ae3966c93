"""Levels that a server would only take on another machine."""

from __future__ import annotations

import pytest

from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.judging import Worker
from eval_pipeline.judge.levels import candidates
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.submission import Submission
from eval_pipeline.problems.problem import FunctionTests

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
