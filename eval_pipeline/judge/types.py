"""The judge's inputs and outputs, and the JSON that client and server exchange.

Imports no other module of the judge, so that configurations and reports can use it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, get_args

from verl_ext.config.schema import section, setting

# Tests


@dataclass(frozen=True)
class FunctionTests:
    """Python tests that call the answer's function or class (HumanEval, MBPP, the quickstart)."""

    entry_point: str
    """Name of the function or class under test."""
    tests: tuple[str, ...]
    """Python sources, at least one. Each is a separate test that runs with a fresh copy of the answer."""
    preamble: str = ""
    """Imports and helpers of the problem; they run before the answer and before each test."""
    code_prompt: str = ""
    """Code that ends with the head of `entry_point`. An answer may consist only of its continuation (HumanEval)."""


@dataclass(frozen=True)
class ProgramCase:
    """One run of a program."""

    stdin: str
    expected: str
    """The expected output."""


@dataclass(frozen=True)
class ProgramTests:
    """Runs of the answer as a program (CodeContests)."""

    cases: tuple[ProgramCase, ...]
    """At least one."""
    tolerance: float | None = None
    """Maximum absolute or relative difference between numbers; None compares text, and decimal numbers by value."""
    any_case: bool = False
    """Whether letters may be printed in upper or lower case."""


@dataclass(frozen=True)
class ReferenceAnswer:
    """A correct answer to compare with (GSM8K)."""

    answer: str


@dataclass(frozen=True)
class ScoredAnswer:
    """An entry of a reasoning_gym dataset, whose own scorer must give the answer a score of 1."""

    task: str
    """Name of the dataset, such as needle_haystack."""
    entry: str
    """The entry as JSON: `question`, `answer` and `metadata`."""


Tests: TypeAlias = FunctionTests | ProgramTests | ReferenceAnswer | ScoredAnswer

# Requests


@dataclass(frozen=True)
class Submission:
    """One answer to judge."""

    program: str
    """The program found in the answer, empty if there is none; the whole answer for `ReferenceAnswer` and
    `ScoredAnswer`."""
    tests: Tests
    error: str | None = None
    """Why there is no answer; the verdict is then `api_error`, and nothing runs."""

    @property
    def num_tests(self) -> int:
        """Number of tests."""
        if isinstance(self.tests, FunctionTests):
            return len(self.tests.tests)
        return len(self.tests.cases) if isinstance(self.tests, ProgramTests) else 1


@dataclass(frozen=True)
class ProgramRun:
    """A program to run without judging it."""

    program: str
    stdin: str
    num_tests = 1


JudgeRequest: TypeAlias = Submission | ProgramRun

# Results

ErrorType = Literal["success", "wrong_answer", "syntax_error", "runtime_error", "timeout", "api_error"]
ERROR_TYPES: tuple[ErrorType, ...] = get_args(ErrorType)


@dataclass(frozen=True)
class Verdict:
    """The result of judging one answer."""

    error_type: ErrorType
    num_passed: int
    num_tests: int
    message: str = ""
    """What went wrong in the first test with this `error_type`."""
    judge_time: float = 0.0
    """Wall-clock seconds that the answer ran."""

    @property
    def pass_ratio(self) -> float:
        """Fraction of tests passed; 0 without tests."""
        return self.num_passed / self.num_tests if self.num_tests else 0.0


RunEnd = Literal["exited", "ended", "cpu", "wall", "memory", "processes", "files"]


@dataclass(frozen=True)
class RunReport:
    """One run of a program, observed from outside its process."""

    end: RunEnd
    """"exited": the program exited; "ended": its test had finished; otherwise the limit that it exceeded."""
    exit_code: int
    """Exit code; negative if a signal killed the program."""
    cpu_s: float
    wall_s: float
    stdout: bytes = b""
    """The beginning of standard output, up to `ResourceLimits.output_mb`."""
    idle_s: float = 0.0
    """Wall-clock seconds in which all processes slept, and none waited for a processor or a disk."""
    stderr: str = ""
    """The end of standard error, at most 2,000 characters."""
    syntax_error: str | None = None
    """Compile error that kept the program from running."""


@dataclass(frozen=True)
class FunctionOutcome:
    """How one test of a function ended, reported by the process that ran the test."""

    kind: Literal["passed", "failed", "error", "lost", "died"]
    """"failed": an assertion of the test; "error": an exception; "lost": the answer ended before the test; "died": the
    process of the test ended."""
    message: str
    waited_s: float = 0.0
    """Wall-clock seconds in which the test waited for the answer."""


# Configuration

ISOLATION_LEVELS = ("bwrap", "sandlock", "rlimits")
"""From the strongest to the weakest; `isolation.py` describes them."""
_TEST_SHARE = 0.8


@dataclass(kw_only=True)
class ResourceLimits:
    """`judge.limits`: resource limits of one test."""

    cpu_s: float = setting(30.0, "CPU seconds per test", gt=0)
    wall_s: float = setting(30.0, "Wall-clock seconds per test; retried once unless the test only waited", gt=0)
    memory_mb: int = setting(1024, "Memory of all processes together, and address space of each, in MB", ge=1)
    num_processes: int = setting(64, "Processes and threads of an answer", ge=1)
    file_mb: int = setting(16, "Size of each file, and of the temporary directory, in MB", ge=1)
    output_mb: float = setting(4.0, "Standard output and standard error, each, in MB", gt=0)

    @property
    def test_cpu_s(self) -> float:
        """CPU seconds of the test's own process.

        Less than the wall-clock limit: if that limit stopped a hanging test, the machine would look too busy for the
        answer, and the test would run again.
        """
        return _TEST_SHARE * self.wall_s


@dataclass(kw_only=True)
class JudgeConfig:
    """`judge`: the sandbox that answers run in."""

    isolation: Literal["auto", "bwrap", "sandlock", "rlimits"] = setting("auto", "Sandbox; auto: bwrap, else sandlock")
    num_workers: int | None = setting(None, "Concurrent programs per worker; null: its share of the cores", ge=1)
    packages: list[str] = setting(
        ["numpy"],
        "Packages that answers and tests can import",
        quoted=True,
    )
    limits: ResourceLimits = section(ResourceLimits)


# Messages between client and server


def request_to_json(request: JudgeRequest, limits: ResourceLimits) -> dict[str, Any]:
    """A request and the limits of each of its runs, as a message."""
    if isinstance(request, ProgramRun):
        return {"op": "run", **asdict(request), "limits": asdict(limits)}
    return {
        "op": "judge",
        "program": request.program,
        "kind": type(request.tests).__name__,
        "tests": asdict(request.tests),
        "limits": asdict(limits),
    }


def request_from_json(message: dict[str, Any]) -> tuple[JudgeRequest, ResourceLimits]:
    """Inverse of `request_to_json`."""
    limits = ResourceLimits(**message["limits"])
    if message["op"] == "run":
        return ProgramRun(message["program"], message["stdin"]), limits
    return Submission(message["program"], _tests_from_json(message["kind"], message["tests"])), limits


def _tests_from_json(kind: str, fields: dict[str, Any]) -> Tests:
    match kind:
        case "FunctionTests":
            return FunctionTests(**{**fields, "tests": tuple(fields["tests"])})
        case "ProgramTests":
            return ProgramTests(**{**fields, "cases": tuple(ProgramCase(**case) for case in fields["cases"])})
        case "ScoredAnswer":
            return ScoredAnswer(**fields)
    return ReferenceAnswer(**fields)


def result_to_json(result: Verdict | RunReport) -> tuple[dict[str, Any], bytes]:
    """A result as a message and its blob."""
    if isinstance(result, Verdict):
        return {"verdict": asdict(result)}, b""
    fields = asdict(result)
    return {"report": fields}, fields.pop("stdout")


def result_from_json(message: dict[str, Any], blob: bytes) -> Verdict | RunReport:
    """Inverse of `result_to_json`."""
    if "verdict" in message:
        return Verdict(**message["verdict"])
    return RunReport(**message["report"], stdout=blob)
