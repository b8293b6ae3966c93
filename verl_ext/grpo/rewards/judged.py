"""Rewards by the verdict of `eval_pipeline`'s judge: answers to compare and programs to run in its sandbox."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from eval_pipeline.judge import JudgeClient, Submission, Tests, Verdict
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.problem import Problem
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

    def __init__(self, server: JudgeClient) -> None:
        """Start a server.

        Args:
            server: not yet started.

        Raises:
            UserError: the wanted isolation does not work on this machine.
        """
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
            self._futures[submission] = self._server.submit(submission)
        return self._futures[submission]

    def verdict(self, future: Future[Verdict]) -> Verdict:
        """What `submit` promised.

        Raises:
            UserError: its tests cannot be read.
            RuntimeError: the judge failed, not the answer.
        """
        verdict = future.result()
        if verdict.error_type == "api_error":
            raise RuntimeError(f"the judge failed: {verdict.message}")
        return verdict

    def forget(self) -> None:
        """No verdict that was promised so far is wanted any more."""
        self._futures.clear()

    def close(self) -> None:
        """End the server."""
        self._server.__exit__(None, None, None)


def _failed(error: Exception) -> Future[Verdict]:
    future: Future[Verdict] = Future()
    future.set_exception(error)
    return future
