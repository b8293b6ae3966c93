"""Runs untrusted programs, each in a sandbox, and judges them from outside the sandbox.

with JudgeClient() as judge:
    verdict = judge.submit(Submission(program, FunctionTests("f", ("assert f(1) == 2",)))).result()
    report = judge.run("print(input())", stdin="hello").result()
"""

from eval_pipeline.judge.client import JudgeClient, JudgeServerError
from eval_pipeline.judge.types import (
    ERROR_TYPES,
    ISOLATION_LEVELS,
    ErrorType,
    FunctionTests,
    JudgeConfig,
    ProgramCase,
    ProgramTests,
    ReferenceAnswer,
    ResourceLimits,
    RunReport,
    ScoredAnswer,
    Submission,
    Tests,
    Verdict,
)

__all__ = [
    "ERROR_TYPES",
    "ISOLATION_LEVELS",
    "ErrorType",
    "FunctionTests",
    "JudgeClient",
    "JudgeConfig",
    "JudgeServerError",
    "ProgramCase",
    "ProgramTests",
    "ReferenceAnswer",
    "ResourceLimits",
    "RunReport",
    "ScoredAnswer",
    "Submission",
    "Tests",
    "Verdict",
]
