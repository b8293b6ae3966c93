"""One task for the model, and what its answer is judged by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FunctionTests:
    """Python tests that call what the answer defines (HumanEval, MBPP, the quickstart)."""

    entry_point: str
    """Name of the function or class that the tests call."""
    tests: tuple[str, ...]
    """Python sources, at least one; each is a test of its own, run anew with the answer."""
    preamble: str = ""
    """Imports and helpers that come with the problem; they run before the answer and before each test."""
    code_prompt: str = ""
    """Code that ends with the head of `entry_point`, where an answer may be no more than what follows (HumanEval)."""


@dataclass(frozen=True)
class Case:
    """One run of a program."""

    stdin: str
    expected: str
    """What it must print."""


@dataclass(frozen=True)
class ProgramTests:
    """Runs of the answer as a program (CodeContests)."""

    cases: tuple[Case, ...]
    """At least one."""
    tolerance: float | None = None
    """Largest absolute or relative difference of two numbers; None where outputs must be the same text."""


@dataclass(frozen=True)
class ReferenceAnswer:
    """A right answer to compare with (GSM8K)."""

    answer: str


Tests = FunctionTests | ProgramTests | ReferenceAnswer


@dataclass(frozen=True)
class Problem:
    """One task for the model."""

    problem_id: str
    prompt: str
    """The user's instruction, without any chat template."""
    tests: Tests
    family: str | None = None
    """Problems of one kind, for the log."""
    canonical_solution: str | None = None
    """An answer that passes; for checks of the judge alone, never shown to a model."""
