"""The threads of the judge server."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from eval_pipeline.judge import ResourceLimits, Submission, Verdict, server
from eval_pipeline.judge.isolation import IsolationLevel
from eval_pipeline.judge.sandbox import ReadWriteLock
from eval_pipeline.judge.types import request_to_json
from tests.helpers.judge import function
from tests.helpers.processes import wait_until


class FailingWorker:
    """A worker that fails on request, with an error that the judge does not expect, and again in its clean-up."""

    num_made = 0

    def __init__(self, level: IsolationLevel, gate: ReadWriteLock) -> None:
        type(self).num_made += 1

    def judge(self, submission: Submission, limits: ResourceLimits) -> Verdict:
        """Fail, or return a successful verdict."""
        if submission.program == "fail":
            raise RecursionError("too deep")
        return Verdict("success", 1, 1)

    def close(self) -> None:
        """Fail."""
        raise RecursionError("too deep again")


def test_failing_worker_fails_only_its_own_submission(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is reported; a new worker judges the next submission, and the server keeps running."""
    monkeypatch.setattr(server, "JudgeWorker", FailingWorker)
    ended: list[int] = []
    monkeypatch.setattr(server, "_end", ended.append)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for number, submission in enumerate((function("fail", "a", "b"), function("right"))):
        jobs.put({"id": number, **request_to_json(submission, ResourceLimits())})
    jobs.put({"id": 2})  # what no client sends
    written: list[dict[str, Any]] = []
    output: Any = type("Output", (), {"write": staticmethod(lambda message, blob: written.append(message))})
    threading.Thread(
        target=server._work, args=(jobs, IsolationLevel("rlimits"), ReadWriteLock(), output), daemon=True
    ).start()
    wait_until(lambda: len(written) == 3 or ended)
    found = {message["id"]: message for message in written}
    assert not ended and found[1]["verdict"]["error_type"] == "success"
    assert "too deep" in found[0]["failed"] and "KeyError" in found[2]["failed"]
    assert FailingWorker.num_made == 3 and "RecursionError: too deep again" in capsys.readouterr().err
