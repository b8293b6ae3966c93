"""A GRPO step, and each part of it: ours with each engine, and TRL's `GRPOTrainer`, in one run.

Each is run as its users start it. All learn from the same few prompts in every step, with the same model
(SmolLM2-135M-Instruct, which `python -m verl_ext.data.prepare smollm2 --output data/smollm2_135m` makes), group size,
longest completion, samples in a forward pass, optimizer, learning rate, loss and reward, without a KL term, gradient
checkpointing or correction of the rollout's probabilities. Nearly all completions reach the longest length;
`tokens_mean` is their mean length. TRL generates with transformers: TRL 1.16 cannot send weights to vLLM 0.32 on CPUs,
where vLLM packs them after loading. All sides run once in each of `--rounds` rounds; `trl_over_ours` is the median of
the rounds' ratios, `ratios` has each, and the other figures are medians too. The first step of each run is left out.

`generation_s` does not include sending the weights to the engine (`sync_s`). `model_s` is what the update computes:
forward and backward passes and the optimizer. `rest_share` is the share of a step beyond these two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.grpo_runs import GROUP_SIZE, MAX_TOKENS, MODEL, PROMPTS, Step, our_steps, peer_steps, write_prompts
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line, progress_bar
from verl_ext.errors import UserError

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


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of the run."""
    engines, ranks, num_steps = arguments.engines, arguments.ranks, arguments.num_steps
    ours: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    theirs: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    num_runs = (len(engines) + 1) * arguments.rounds
    with tempfile.TemporaryDirectory() as name, progress_bar(total=num_runs, desc="runs", unit="runs") as bar:
        scratch = Path(name)
        write_prompts(scratch / "prompts.parquet")
        for _ in range(arguments.rounds):
            for engine in engines:
                ours[engine].append(summary_of(our_steps(engine, ranks, num_steps, scratch)))
                bar.update()
            steps, versions = peer_steps(ranks, num_steps, scratch)
            theirs.append(summary_of(steps))
            bar.update()
    return {
        "versions": versions,
        "ranks": ranks,
        "samples_per_step": PROMPTS * GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "engines": {engine: compared(runs, theirs) for engine, runs in ours.items()},
        "trl": medians_of(theirs),
    }


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> dict[str, Any]:
    """Our runs with one engine, and their ratios to TRL's of the same rounds."""
    ratios = [their["step_s"] / our["step_s"] for our, their in zip(ours, theirs)]
    return {"ours": medians_of(ours), "trl_over_ours": statistics.median(ratios), "ratios": ratios}


def table_of(figures: dict[str, Any]) -> str:
    """The figures as text."""
    sides = {f"ours, {engine}": found["ours"] for engine, found in figures["engines"].items()}
    lines = [f"{'':<12}" + "".join(f"{name:>14}" for name in (*PARTS, "rest_share", "tokens_mean"))]
    for name, found in {**sides, "TRL, hf": figures["trl"]}.items():
        numbers = "".join(f"{found[part]:14.2f}" for part in PARTS)
        lines.append(f"{name:<12}{numbers}{found['rest_share']:14.1%}{found['tokens_mean']:14.1f}")
    for engine, found in figures["engines"].items():
        spread = f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}"
        lines.append(f"TRL takes {found['trl_over_ours']:.2f} times as long as ours with {engine} ({spread})")
    return "\n".join(lines)


@clean_exit()
def main() -> None:
    """Measure, print the figures and write them."""
    parser = bench_parser("grpo", __doc__, "", "--engines hf --num-steps 8 --output FILE.json")
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"], help="of our trainer")
    parser.add_argument("--ranks", type=IntArg(), default=1, help=f"processes of each side, a divisor of {PROMPTS}")
    parser.add_argument("--rounds", type=IntArg(), default=3, help="runs of each side")
    parser.add_argument("--num-steps", type=IntArg(2), default=4, help="of each run; the first is left out")
    arguments = parser.parse_args()
    if PROMPTS % arguments.ranks:
        raise UserError(f"--ranks is {arguments.ranks}; it must divide {PROMPTS}")
    if not MODEL.is_dir():
        raise UserError(f"{MODEL} is missing; run `python -m verl_ext.data.prepare smollm2 --output {MODEL}`")
    figures = measure(arguments)
    print_line(table_of(figures))
    write_figures(figures, arguments.output)


if __name__ == "__main__":
    main()
