"""Rewards by the verdict of `eval_pipeline`'s judge: answers to compare and programs to run in its sandbox."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from eval_pipeline.judge.client import JudgeServer, JudgeServerError
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import num_tests_of
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.problem import Problem, Tests
from eval_pipeline.problems.verl_rl import read_tests
from verl_ext.grpo.rewards.answer import RewardedAnswer

OF_VERDICTS: dict[str, Callable[[Verdict], float]] = {
    "reward_correct": lambda verdict: float(verdict.error_type == "success"),
    "code_tests": lambda verdict: verdict.pass_ratio,
    "exec_success": lambda verdict: float(verdict.error_type in ("success", "wrong_answer")),
}
"""By their names in a recipe: the answer is right; share of tests passed; the program ran."""
OF_TESTS = ("code_tests", "exec_success")
"""Those that need a ground truth with tests, because they run a program."""


def tests_of(answer: RewardedAnswer) -> Tests:
    """What an answer is judged by.

    Raises:
        UserError: the row's `reward_model.ground_truth` is missing or cannot be read.
    """
    return read_tests(answer.ground_truth, answer.sample_id)


class Judged:
    """Has answers judged, each once: samples of one prompt often say the same."""

    def __init__(self, make_server: Callable[[], JudgeServer], patience_s: float) -> None:
        """Start a server; one that dies or gives no verdict any more is replaced by another.

        Args:
            make_server: makes one.
            patience_s: the longest that one test may take, and so a server be silent; times the tests of an answer.

        Raises:
            UserError: the wanted isolation does not work on this machine.
        """
        self._make_server, self._patience_s = make_server, patience_s
        self._num_verdicts = 0
        self._sender = ThreadPoolExecutor(1)
        self._server = make_server().__enter__()
        self._futures: dict[Submission, Future[Verdict]] = {}
        self._submissions: dict[Future[Verdict], Submission] = {}

    def submit(self, answer: RewardedAnswer) -> Future[Verdict]:
        """The verdict on one answer, some time later; see `verdict`, which also tells why there can be none."""
        try:
            problem = Problem(answer.sample_id, "", tests_of(answer))
            submission = Submission(extract_program(problem, answer.text), problem.tests)
        except Exception as error:  # extraction meets whatever a model writes
            return _failed(error)
        if submission not in self._futures:
            self._futures[submission] = self._submitted(submission)
        return self._futures[submission]

    def verdict(self, future: Future[Verdict]) -> Verdict:
        """What `submit` promised; once more by another server where the first one died.

        Raises:
            UserError: its tests cannot be read.
            RuntimeError: the judge failed, not the answer.
        """
        try:
            verdict = self._awaited(future)
        except JudgeServerError:
            verdict = self._awaited(self._submitted(self._submissions[future]))
        if verdict.error_type == "api_error":
            raise RuntimeError(f"the judge failed: {verdict.message}")
        return verdict

    def forget(self) -> None:
        """No verdict that was promised so far is wanted any more."""
        self._futures.clear()
        self._submissions.clear()

    def close(self) -> None:
        """End the server."""
        self._sender.shutdown()
        self._server.__exit__(None, None, None)

    def _submitted(self, submission: Submission) -> Future[Verdict]:
        try:
            future = self._handed_in(submission)
            future.add_done_callback(self._count)
        except Exception as error:  # no server comes up any more
            future = _failed(error)
        self._submissions[future] = submission
        return future

    def _handed_in(self, submission: Submission) -> Future[Verdict]:
        server = self._running_server()
        handing = self._sender.submit(server.submit, submission)
        try:
            return handing.result(self._patience_s)
        except FutureTimeout:  # it no longer reads what it is sent
            server.kill()
            return handing.result()

    def _count(self, future: Future[Verdict]) -> None:
        self._num_verdicts += 1

    def _awaited(self, future: Future[Verdict]) -> Verdict:
        """The verdict; a `JudgeServerError` when the server has been silent for longer than a judgement can take."""
        tests = max((num_tests_of(submission.tests) for submission in self._submissions.values()), default=1)
        while True:
            num_verdicts = self._num_verdicts
            try:
                return future.result(self._patience_s * tests)
            except FutureTimeout:
                if num_verdicts == self._num_verdicts:
                    self._server.kill()  # what waits for it fails

    def _running_server(self) -> JudgeServer:
        if self._server.ended:
            self._server.__exit__(None, None, None)
            self._server = self._make_server().__enter__()
        return self._server


def _failed(error: Exception) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_exception(error)
    return future
