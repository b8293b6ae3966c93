"""Rewards by the verdict of `eval_pipeline`'s judge: answers to compare and programs to run in its sandbox."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

from eval_pipeline.judge.client import JudgeServer
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

    def __init__(self, server: JudgeServer, patience_s: float) -> None:
        """Start a server; one that gives no verdict any more is killed, and its client replaces it.

        Args:
            server: not yet started.
            patience_s: the longest that one test may take, and so a server be silent; times the tests of an answer.

        Raises:
            UserError: the wanted isolation does not work on this machine.
        """
        self._patience_s = patience_s
        self._num_verdicts = 0
        self._most_tests = 1
        self._sender = ThreadPoolExecutor(1)
        self._server = server.__enter__()
        self._futures: dict[Submission, Future[Verdict]] = {}

    def submit(self, answer: RewardedAnswer) -> Future[Verdict]:
        """The verdict on one answer, some time later; see `verdict`, which also tells why there can be none."""
        try:
            problem = Problem(answer.sample_id, "", tests_of(answer))
            submission = Submission(extract_program(problem, answer.text), problem.tests)
        except Exception as error:  # extraction meets whatever a model writes
            return _failed(error)
        if submission not in self._futures:
            self._futures[submission] = self._handed_in(submission)
            self._futures[submission].add_done_callback(self._count)
        return self._futures[submission]

    def verdict(self, future: Future[Verdict]) -> Verdict:
        """What `submit` promised.

        Raises:
            UserError: its tests cannot be read.
            RuntimeError: the judge failed, not the answer.
        """
        while True:
            num_verdicts = self._num_verdicts
            try:
                verdict = future.result(self._patience_s * self._most_tests)
                break
            except FutureTimeout:
                # silent for longer than a judgement can take
                if num_verdicts == self._num_verdicts:
                    self._server.kill()
        if verdict.error_type == "api_error":
            raise RuntimeError(f"the judge failed: {verdict.message}")
        return verdict

    def forget(self) -> None:
        """No verdict that was promised so far is wanted any more."""
        self._futures.clear()
        self._most_tests = 1

    def close(self) -> None:
        """End the server."""
        self._sender.shutdown()
        self._server.__exit__(None, None, None)

    def _handed_in(self, submission: Submission) -> Future[Verdict]:
        self._most_tests = max(self._most_tests, num_tests_of(submission.tests))
        handing = self._sender.submit(self._server.submit, submission)
        try:
            return handing.result(self._patience_s)
        except FutureTimeout:  # it no longer reads what it is sent
            self._server.kill()
            return handing.result()

    def _count(self, future: Future[Verdict]) -> None:
        self._num_verdicts += 1


def _failed(error: Exception) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_exception(error)
    return future
