"""The threads of the judge server."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge import server
from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.levels import Level
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import dump_submission
from tests.helpers.judge import function
from tests.helpers.processes import wait_until


class FailingWorker:
    """Fails where it is asked to, with an error that the judge does not expect, and in its clean-up."""

    num_made = 0

    def __init__(self, level: Level, gate: Gate) -> None:
        type(self).num_made += 1

    def judge(self, submission: Submission, limits: JudgeLimits) -> Verdict:
        """Fail, or judge it right."""
        if submission.program == "fail":
            raise RecursionError("too deep")
        return Verdict("success", 1, 1)

    def close(self) -> None:
        """Fail."""
        raise RecursionError("too deep again")


def test_a_failing_worker_costs_its_own_submission(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That is an `api_error` with the reason; a new worker judges the next one, and the server does not end."""
    monkeypatch.setattr(server, "Worker", FailingWorker)
    ended: list[int] = []
    monkeypatch.setattr(server, "_end", ended.append)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for number, submission in enumerate((function("fail", "a", "b"), function("right"))):
        jobs.put({"id": number, **dump_submission(submission, JudgeLimits())})
    jobs.put({"id": 2})  # what no client sends
    written: list[dict[str, Any]] = []
    output: Any = type("Output", (), {"write": staticmethod(written.append)})
    threading.Thread(target=server._work, args=(jobs, Level("rlimits"), Gate(), output), daemon=True).start()
    wait_until(lambda: len(written) == 3 or ended)
    verdicts = {message["id"]: message["verdict"] for message in written}
    assert not ended and [verdicts[n]["error_type"] for n in range(3)] == ["api_error", "success", "api_error"]
    assert verdicts[0]["num_tests"] == 2 and "too deep" in verdicts[0]["message"]
    assert FailingWorker.num_made == 3 and "RecursionError: too deep again" in capsys.readouterr().err
