"""A GRPO step, and each part of it: ours beside TRL's `GRPOTrainer`, in one run.

Each is run as its users start it. Both learn from the same few prompts in every step, with the same model
(SmolLM2-135M-Instruct, which `python -m verl_ext.data.prepare smollm2 --output data/smollm2_135m` makes), group size,
longest completion, samples in a forward pass, optimizer, learning rate, loss and reward, without a KL term, gradient
checkpointing or correction of the rollout's probabilities. Nearly all completions reach the longest length;
`tokens_mean` says how long they were. The sides take turns, engine by engine, `--rounds` times; `trl_over_ours` is the
median of the rounds' ratios, `ratios` has each, and the other figures are medians too. Of each run only the steps after
the first count: the first is not warm.

`generation_s` is drawing, without sending the weights to the engine (`sync_s`). `model_s` is what the update computes:
forward and backward passes and the optimizer. `rest_share` is what is left of a step beside these two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.grpo_runs import (
    GROUP_SIZE,
    MAX_TOKENS,
    MODEL,
    PROMPTS,
    Step,
    our_steps,
    peer_steps,
    write_prompts,
)
from verl_ext.argument_types import WholeNumber
from verl_ext.command_line import clean_exit
from verl_ext.errors import UserError
from verl_ext.progress import progress_bar
from verl_ext.tell import tell

PARTS = ("step_s", "generation_s", "model_s", "sync_s", "reward_s")


def summary_of(steps: list[Step]) -> dict[str, Any]:
    """Medians of all steps but the first, with the steps themselves."""
    warm = steps[1:]
    medians = {name: statistics.median(step.get(name, 0.0) for step in warm) for name in (*PARTS, "tokens_mean")}
    known = [step["generation_s"] + step["model_s"] for step in warm]
    rest = [1 - seconds / step["step_s"] for seconds, step in zip(known, warm)]
    return {**medians, "rest_share": statistics.median(rest), "steps": steps}


def medians_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The medians of what `summary_of` says of some runs, with the steps of each."""
    names = [name for name in runs[0] if name != "steps"]
    medians = {name: statistics.median(run[name] for run in runs) for name in names}
    return {**medians, "steps": [run["steps"] for run in runs]}


def bar_over(engines: list[str], rounds: int) -> Any:
    """A bar of both sides' runs with each engine."""
    return progress_bar(total=2 * rounds * len(engines), desc="runs", unit="runs")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of the run."""
    engines: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, bar_over(arguments.engines, arguments.rounds) as bar:
        scratch = Path(name)
        write_prompts(scratch / "prompts.parquet")
        for engine in arguments.engines:
            ours, theirs = [], []
            for _ in range(arguments.rounds):
                bar.set_description(f"ours, {engine}")
                ours.append(summary_of(our_steps(engine, arguments.ranks, arguments.num_steps, scratch)))
                bar.update()
                bar.set_description(f"TRL, {engine}")
                steps, versions = peer_steps(engine, arguments.ranks, arguments.num_steps, scratch)
                theirs.append(summary_of(steps))
                bar.update()
            ratios = [their["step_s"] / our["step_s"] for our, their in zip(ours, theirs)]
            engines[engine] = {
                "ours": medians_of(ours),
                "trl": medians_of(theirs),
                "trl_over_ours": statistics.median(ratios),
                "ratios": ratios,
            }
    return {
        "versions": versions,
        "ranks": arguments.ranks,
        "samples_per_step": PROMPTS * GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "engines": engines,
    }


def table_of(figures: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'engine':<7}{'':<6}" + "".join(f"{name:>14}" for name in (*PARTS, "rest_share", "tokens_mean"))]
    for engine, found in figures["engines"].items():
        for side in ("ours", "trl"):
            values = [found[side][name] for name in PARTS]
            numbers = "".join(f"{value:14.2f}" for value in values)
            lines.append(
                f"{engine:<7}{side:<6}{numbers}{found[side]['rest_share']:14.1%}{found[side]['tokens_mean']:14.1f}"
            )
        spread = f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}"
        lines.append(f"{engine}: TRL takes {found['trl_over_ours']:.2f} times as long ({spread})")
    return "\n".join(lines)


@clean_exit()
def main() -> None:
    """Measure, print the figures and write them."""
    parser = bench_parser("grpo", __doc__, "", "--engines hf --num-steps 8 --output FILE.json")
    parser.add_argument(
        "--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"], help="what completions are drawn by"
    )
    parser.add_argument(
        "--ranks", type=WholeNumber(), default=1, help=f"processes of each side, a divisor of {PROMPTS}"
    )
    parser.add_argument("--rounds", type=WholeNumber(), default=3, help="runs of each side and engine")
    parser.add_argument("--num-steps", type=WholeNumber(2), default=4, help="of each run; the first is left out")
    arguments = parser.parse_args()
    if PROMPTS % arguments.ranks:
        raise UserError(f"--ranks is {arguments.ranks}; it must divide {PROMPTS}")
    if not MODEL.is_dir():
        raise UserError(f"{MODEL} is missing; run `python -m verl_ext.data.prepare smollm2 --output {MODEL}`")
    figures = measure(arguments)
    tell(table_of(figures))
    write_figures(figures, arguments.output)


if __name__ == "__main__":
    main()
