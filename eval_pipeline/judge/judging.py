"""Judges one submission in the sandboxes of one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from eval_pipeline.config import JudgeLimits
from eval_pipeline.judge.comparisons import Comparer
from eval_pipeline.judge.gate import Gate
from eval_pipeline.judge.levels import Level
from eval_pipeline.judge.rules import MESSAGE_CHARS, NO_PROGRAM, TestResult, function_result, program_result, verdict_of
from eval_pipeline.judge.runs import Runs
from eval_pipeline.judge.sandbox import SandboxError
from eval_pipeline.judge.submission import Submission
from eval_pipeline.judge.verdict import Verdict
from eval_pipeline.judge.wire import num_tests_of
from eval_pipeline.judge.workshop import Workshop
from eval_pipeline.problems.problem import Case, FunctionTests, ProgramTests, ReferenceAnswer

_ATTEMPTS = 2


@dataclass
class Worker:
    """Judges one submission at a time."""

    level: Level
    gate: Gate
    """Shared by all workers of the machine."""

    def __post_init__(self) -> None:
        """Nothing starts until it is needed."""
        self._workshop = Workshop(self.level)
        self._comparer = Comparer()

    def judge(self, submission: Submission, limits: JudgeLimits) -> Verdict:
        """The verdict; a sandbox that fails is replaced once, then the verdict is `api_error`."""
        for _ in range(_ATTEMPTS):
            try:
                return self._judge(submission, limits)
            except (SandboxError, OSError) as error:
                self.close()
                failure = str(error)
        return Verdict("api_error", 0, num_tests_of(submission.tests), failure[:MESSAGE_CHARS])

    def close(self) -> None:
        """End the sandboxes; the next submission starts new ones."""
        self._workshop.close()
        self._comparer.close()

    def _judge(self, submission: Submission, limits: JudgeLimits) -> Verdict:
        if isinstance(submission.tests, ReferenceAnswer):
            with self.gate.shared():
                return self._comparer.judge(submission.program, submission.tests.answer, limits)
        if not submission.program:
            return verdict_of([NO_PROGRAM], num_tests_of(submission.tests))
        results = []
        preamble = submission.tests.preamble if isinstance(submission.tests, FunctionTests) else ""
        with self._workshop.runs(submission.program, preamble, limits) as runs:
            for run in self._tests(submission.tests, runs, limits):
                results.append(self._run(run))
                if results[-1].error_type in ("timeout", "syntax_error"):
                    break  # the tests that are left are not passed
        return verdict_of(results, num_tests_of(submission.tests))

    def _run(self, run: Callable[[], TestResult]) -> TestResult:
        with self.gate.shared():
            result = run()
        if not result.doubtful:
            return result
        # neither a busy machine nor a killed process of ours may cost an answer its verdict
        with self.gate.alone():
            return run()

    def _tests(
        self, tests: FunctionTests | ProgramTests, runs: Runs, limits: JudgeLimits
    ) -> Iterator[Callable[[], TestResult]]:
        if isinstance(tests, FunctionTests):
            for test in tests.tests:
                yield partial(_function_test, tests, test, runs, limits)
            return
        match = partial(self._comparer.outputs_match, tolerance=tests.tolerance)
        for case in tests.cases:
            yield partial(_program_test, case, match, runs, limits)


def _function_test(tests: FunctionTests, test: str, runs: Runs, limits: JudgeLimits) -> TestResult:
    return function_result(*runs.run_function_test(tests.preamble, tests.entry_point, test), limits)


def _program_test(case: Case, match: Callable[[str, str], bool], runs: Runs, limits: JudgeLimits) -> TestResult:
    return program_result(*runs.run_program(case.stdin.encode(errors="surrogatepass")), case, match, limits)
