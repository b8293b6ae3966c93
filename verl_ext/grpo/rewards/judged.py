"""Rewards by the verdict of `eval_pipeline`'s judge: answers to compare and programs to run in its sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from eval_pipeline.judge.client import JudgeServer, JudgeServerError
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.problems.extract import extract_program
from eval_pipeline.problems.problem import Case, FunctionTests, Problem, ProgramTests, ReferenceAnswer, Tests
from verl_ext.errors import UserError
from verl_ext.grpo.rewards.answer import RewardedAnswer

OF_VERDICTS: dict[str, Callable[[Verdict], float]] = {
    "reward_correct": lambda verdict: float(verdict.error_type == "success"),
    "code_tests": lambda verdict: verdict.pass_ratio,
    "exec_success": lambda verdict: float(verdict.error_type in ("success", "wrong_answer")),
}
"""By their names in a recipe: the answer is right; share of tests passed; the program ran."""


class Judged:
    """Has answers judged, each once: samples of one prompt often say the same."""

    def __init__(self, make_server: Callable[[], JudgeServer]) -> None:
        """Start a server; one that dies is replaced by another.

        Raises:
            UserError: the wanted isolation does not work on this machine.
        """
        self._make_server = make_server
        self._server = make_server().__enter__()
        self._futures: dict[Submission, Future[Verdict]] = {}
        self._submissions: dict[Future[Verdict], Submission] = {}

    def submit(self, answer: RewardedAnswer) -> Future[Verdict]:
        """The verdict on one answer, some time later; see `verdict`."""
        failed: Future[Verdict] = Future()
        try:
            problem = Problem(answer.sample_id, "", read_tests(answer.ground_truth, answer.sample_id))
            submission = Submission(extract_program(problem, answer.text), problem.tests)
            if submission not in self._futures:
                self._futures[submission] = self._running_server().submit(submission)
        except Exception as error:  # it is told where the verdict is asked for
            failed.set_exception(error)
            return failed
        future = self._futures[submission]
        self._submissions[future] = submission
        return future

    def verdict(self, future: Future[Verdict]) -> Verdict:
        """What `submit` promised; once more by another server where the first one died.

        Raises:
            UserError: its tests cannot be read.
            RuntimeError: the judge failed, not the answer.
        """
        try:
            verdict = future.result()
        except JudgeServerError:
            verdict = self._running_server().submit(self._submissions[future]).result()
        if verdict.error_type == "api_error":
            raise RuntimeError(f"the judge failed: {verdict.message}")
        return verdict

    def forget(self) -> None:
        """No verdict that was promised so far is wanted any more."""
        self._futures.clear()
        self._submissions.clear()

    def close(self) -> None:
        """End the server."""
        self._server.__exit__(None, None, None)

    def _running_server(self) -> JudgeServer:
        if self._server.ended:
            self._server.__exit__(None, None, None)
            self._server = self._make_server().__enter__()
        return self._server


def read_tests(ground_truth: Any, sample_id: str) -> Tests:
    """What an answer is judged by.

    A mapping, also as JSON, with `entry_point` and `tests` (a list of Python sources; `preamble` as an option) is of a
    function, one with `inputs` and `outputs` (verl's format for code) of a program. Any other text or number is the
    right answer itself.

    Raises:
        UserError: there is none, or a mapping that is neither.
    """
    fields = ground_truth
    if isinstance(ground_truth, str):
        try:
            fields = json.loads(ground_truth)
        except ValueError:
            fields = None
    if not isinstance(fields, dict) and isinstance(ground_truth, (str, int, float)):
        return ReferenceAnswer(str(ground_truth))
    if not isinstance(fields, dict):
        raise UserError(f"{sample_id} has no reward_model.ground_truth that is a text, a number or tests")
    if _is_list_of_text(fields.get("tests")) and isinstance(fields.get("entry_point"), str):
        return FunctionTests(fields["entry_point"], tuple(fields["tests"]), str(fields.get("preamble") or ""))
    if _is_list_of_text(fields.get("inputs")) and _is_list_of_text(fields.get("outputs")) and "fn_name" not in fields:
        if len(fields["inputs"]) == len(fields["outputs"]):
            return ProgramTests(tuple(map(Case, fields["inputs"], fields["outputs"])))
    raise UserError(
        f"the tests of {sample_id} (reward_model.ground_truth) cannot be read; give a JSON object with entry_point and "
        "tests, or with inputs and outputs of the same length"
    )


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(item, str) for item in value)
