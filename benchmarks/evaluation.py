"""Evaluating a model on HumanEval's 164 problems: how well generation and judging overlap, and the seconds by part.

DIR is an export, by default the quickstart's model of random weights
(`python -m verl_ext.data.prepare quickstart --output data/quickstart`).

By turns, in one process, the evaluation's own worker does one batch of all problems with its engine loaded:
`generation` draws every answer and judges none; `judging` judges answers that are there and draws none; `whole` does
both as an evaluation does. `ratio` is whole / the longer of the other two. What is judged are the `generated` answers,
and in turns of their own the `canonical` solutions, each handed in at the moment when the model's answer to its problem
is drawn: a small model's answers mostly fail at once, and cost a judge less than right ones do. `tail_s` is what a
whole turn takes after its last answer.

Where both need every processor, no overlap can make the whole shorter than their processor time divided by the number
of processors: `cpu_bound_s`. `over_cpu_bound` is whole / the longest of generation, judging and that bound.

`command` is `python -m eval_pipeline run` beside that, from its start to metrics.json, by part: `start_s` until the
engine is ready, `answering_s` until the last verdict, `writing_s` until the figures are public. Medians count.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.evaluation_command import command_parts
from benchmarks.evaluation_turns import VARIANTS, Turn, Turns
from benchmarks.running import ROOT
from eval_pipeline.recipe import load_eval_config
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line, progress_bar

MODEL = ROOT / "data" / "quickstart" / "model"
Found = dict[str, list[Turn]]
"""Turns of each kind."""


def measure_turns(turns: Turns, repeats: int) -> Found:
    """All turns, the order reversed from one round to the next; the first round is for warming up."""
    found: Found = {kind: [] for kind in turns.kinds}
    for number in progress_bar(range(repeats + 1), desc="measuring", unit="rounds"):
        for kind in reversed(turns.kinds) if number % 2 else turns.kinds:
            turn = turns.take(kind)
            if number:
                found[kind].append(turn)
    return found


def medians_of(turns: list[Turn]) -> Turn:
    """The median of each figure."""
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def overlap_of(generation: Turn, judging: Turn, whole: Turn, num_processors: int) -> dict[str, float]:
    """How well the two overlapped in a whole turn.

    Args:
        generation: wall-clock and processor seconds, `wall_s` and `cpu_s`, of drawing alone.
        judging: the same of judging alone.
        whole: of both together.
        num_processors: that both share.
    """
    longer = max(generation["wall_s"], judging["wall_s"])
    bound = (generation["cpu_s"] + judging["cpu_s"]) / num_processors
    return {
        "ratio": whole["wall_s"] / longer,
        "one_after_the_other_ratio": (generation["wall_s"] + judging["wall_s"]) / longer,
        "cpu_bound_s": bound,
        "over_cpu_bound": whole["wall_s"] / max(longer, bound),
    }


def summary_of(found: Found, num_problems: int, num_processors: int) -> dict[str, Any]:
    """Medians, ratios and rates of each variant."""
    generation = medians_of(found["generation"])
    summary: dict[str, Any] = {"generation": generation}
    for variant in VARIANTS:
        judging, whole = (medians_of(found[f"{part} {variant}"]) for part in ("judging", "whole"))
        summary[variant] = {
            "judging": judging,
            "whole": whole,
            "problems_per_s": num_problems / whole["wall_s"],
            **overlap_of(generation, judging, whole, num_processors),
        }
    return summary


def table_of(summary: dict[str, Any]) -> str:
    """The figures as text."""
    rows = [
        f"{'':<12}{'generation':>11}{'judging':>9}{'whole':>8}{'tail':>7}{'ratio':>7}{'CPU bound':>11}{'over it':>9}"
    ]
    for variant in VARIANTS:
        each = summary[variant]
        seconds = [summary["generation"]["wall_s"], each["judging"]["wall_s"], each["whole"]["wall_s"]]
        rows.append(
            f"{variant:<12}{seconds[0]:>11.2f}{seconds[1]:>9.2f}{seconds[2]:>8.2f}{each['whole']['tail_s']:>7.2f}"
            f"{each['ratio']:>7.2f}{each['cpu_bound_s']:>11.2f}{each['over_cpu_bound']:>9.2f}"
        )
    return "\n".join(rows)


@clean_exit()
def main() -> int:
    """Measure, print and write."""
    more = "--model models/mine --repeats 3 --output FILE.json sampling.max_tokens=256"
    parser = bench_parser("evaluation", __doc__, "", more)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the recipe humaneval")
    parser.add_argument(
        "--model", type=Path, metavar="DIR", default=MODEL, help="export (default: the quickstart's random model)"
    )
    parser.add_argument("--repeats", type=IntArg(), default=5, help="turns of each kind that count")
    parser.add_argument("--commands", type=IntArg(0), default=3, help="runs of the command, after one to warm up")
    arguments = parser.parse_args()
    overrides = arguments.overrides
    with Turns(load_eval_config("humaneval", overrides), arguments.model.resolve()) as turns:
        found = measure_turns(turns, arguments.repeats)
        about = {"answers": turns.about(), "num_problems": turns.num_problems}
    summary = summary_of(found, turns.num_problems, len(os.sched_getaffinity(0)))
    print_line(table_of(summary))
    if arguments.commands:
        turns_of_it = progress_bar(range(arguments.commands + 1), desc="the command", unit="runs")
        commands = [command_parts(arguments.model.resolve(), overrides) for _ in turns_of_it][1:]
        summary["command"] = medians_of(commands)
        print_line("command: " + ", ".join(f"{name} {value:.2f}" for name, value in summary["command"].items()))
    job = {"model": arguments.model.name, "overrides": overrides, **about, "repeats": arguments.repeats}
    write_figures({**job, **summary, "turns": found}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
