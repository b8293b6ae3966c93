"""A GRPO step and its parts: ours with each engine, and TRL's `GRPOTrainer`, in one run.

Each side runs the way its users start it. All learn from the same few prompts in every step, with the same model
(SmolLM2-135M-Instruct; create it with `python -m verl_ext.data.prepare smollm2 --output data/smollm2_135m`), the same
group size, maximum completion length, samples in a forward pass, optimizer, learning rate, loss and reward, without KL
term, gradient checkpointing or rollout correction. Nearly all completions reach the maximum length; `tokens_mean` is
their mean length. TRL generates with transformers: TRL 1.16 cannot send weights to vLLM 0.32 on CPUs, where vLLM packs
them after loading. All sides alternate, `--rounds` times. `trl_over_ours` is the median of the rounds' `ratios`; the
other numbers are medians of all steps, with their `ranges`. The first step of each run is excluded.

`generation_s` does not include sending the weights to the engine (`sync_s`). `model_s` is the computation of the
update: forward and backward passes and the optimizer. `rest_share` is the share of a step outside these two.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import (
    ROOT,
    Numbers,
    Results,
    bench_parser,
    in_rounds,
    medians,
    ranges,
    run,
    run_ranks,
    spread,
    write_results,
)
from verl_ext.cli import IntArg, clean_exit
from verl_ext.console import print_line
from verl_ext.errors import UserError
from verl_ext.metrics.jsonl import METRICS_FILE, read_metrics

MODEL = ROOT / "data" / "smollm2_135m"
PROMPTS = 4
GROUP_SIZE = 8
MICRO_BATCH_SIZE = 8
MAX_TOKENS = 64
MAX_PROMPT_TOKENS = 192
LR = 1e-6
QUESTIONS = (
    "A train of {} cars carries {} people in each car. At the next station {} people get off and {} get on, and one "
    "car is left behind empty after its passengers moved to the others. How many people are in each car on average, "
    "and how many seats are free in the train if each car has {} seats? Explain each step before you give the result."
)
PARTS = ("step_s", "generation_s", "model_s", "sync_s", "reward_s")
TRL = "trl"
GRPOStep = dict[str, float]
"""Seconds of a step and of its parts, and `tokens_mean` of its completions."""


def write_prompts(path: Path) -> None:
    """Questions of similar length in verl's RL format."""
    import pandas as pd  # here, so that --help need not wait for it

    turns = [[{"role": "user", "content": QUESTIONS.format(*range(n + 11, n + 16))}] for n in range(PROMPTS)]
    rows = [
        {"data_source": "benchmark", "prompt": turn, "reward_model": {"style": "rule", "ground_truth": "0"}}
        for turn in turns
    ]
    pd.DataFrame(rows).to_parquet(path)


# The sides


def our_steps(engine: str, ranks: int, num_steps: int, scratch: Path) -> list[GRPOStep]:
    """Run our command with its smallest recipe; returns the steps from its metrics.

    Each call has its own run directory, because a finished run does not train again.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as run_dir:
        settings = {
            "recipe": "smollm2_gsm8k",
            "prepare": "[]",
            "model.partial_pretrain": MODEL,
            "data.train_files": scratch / "prompts.parquet",
            "data.val_files": "null",
            "data.eval_every_steps": 0,
            "data.max_prompt_length": MAX_PROMPT_TOKENS,
            "data.max_response_length": MAX_TOKENS,
            "data.train_batch_size": PROMPTS,
            "data.micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
            "rollout.engine": engine,
            "rollout.n": GROUP_SIZE,
            "reward.functions": f"[{__file__}:compute_score]",
            "optim.lr": LR,
            "trainer.total_epochs": num_steps,
            "trainer.total_training_steps": num_steps,
            "trainer.save_freq": -1,
            "trainer.checkpoint.save_contents": "[model]",
            "trainer.log_samples_every": 0,
            "trainer.logger": "[console]",
            "trainer.default_local_dir": run_dir,
        }
        words = [f"{key}={value}" for key, value in settings.items()]
        run(["bash", "run_grpo.sh", str(ranks), *words], {"VERL_EXT_PYTHON": sys.executable})
        return [our_step(row) for row in read_metrics(Path(run_dir, METRICS_FILE)) if "time/train/update_s" in row]


def our_step(row: Numbers) -> GRPOStep:
    """Rename a row of metrics for this benchmark."""
    return {
        "step_s": row["time/train/step_s"],
        "generation_s": row["time/train/rollout_s"],
        "model_s": row["time/train/update_s"],
        "sync_s": row.get("weights/sync_s", 0.0),
        "reward_s": row["time/train/reward_s"],
        "tokens_mean": row["train/seq_completion_len_mean"],
    }


def trl_steps(ranks: int, num_steps: int, scratch: Path) -> list[GRPOStep]:
    """Run TRL's trainer under torchrun; returns its steps."""
    return run_ranks("trl_ranks:grpo", str(MODEL), str(scratch), str(num_steps), ranks=ranks, torchrun=True)


# The reward is cheap and varies within a group, so that every sample has an advantage


def score(solution_str: str) -> float:
    """Number of distinct characters divided by the length."""
    return len(set(solution_str)) / max(len(solution_str), 1)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    """`score` with verl's signature."""
    return score(solution_str)


def variety(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """`score` with TRL's signature."""
    return [score(completion[0]["content"]) for completion in completions]


# The measurement


def measure(engines: Sequence[str], ranks: int, rounds: int, num_steps: int) -> Results:
    """Measure all sides, in rounds."""
    with tempfile.TemporaryDirectory(prefix="benchmark_grpo_") as name:
        scratch = Path(name)
        write_prompts(scratch / "prompts.parquet")
        sides = {engine: partial(our_steps, engine, ranks, num_steps, scratch) for engine in engines}
        runs = in_rounds({**sides, TRL: partial(trl_steps, ranks, num_steps, scratch)}, rounds, "runs")
    return {
        "ranks": ranks,
        "samples_per_step": PROMPTS * GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "engines": {engine: compared(runs[engine], runs[TRL]) for engine in engines},
        TRL: summary_of(runs[TRL]),
    }


def summary_of(runs: Sequence[Sequence[GRPOStep]]) -> Results:
    """Medians and ranges of all steps but the first of each run, with the steps themselves."""
    steps = [{**dict.fromkeys(PARTS, 0.0), **step} for run_steps in runs for step in run_steps[1:]]
    for step in steps:
        step["rest_share"] = 1 - (step["generation_s"] + step["model_s"]) / step["step_s"]
    return {**medians(steps), "ranges": ranges(steps), "steps": runs}


def compared(ours: Sequence[Sequence[GRPOStep]], theirs: Sequence[Sequence[GRPOStep]]) -> Results:
    """Our runs with one engine, and the ratios of TRL's runs to them, round by round."""
    ratios = [step_s(their) / step_s(our) for our, their in zip(ours, theirs)]
    return {"ours": summary_of(ours), "trl_over_ours": statistics.median(ratios), "ratios": ratios}


def step_s(steps: Sequence[GRPOStep]) -> float:
    """Median seconds of a run's steps, excluding the first."""
    return statistics.median(step["step_s"] for step in steps[1:])


def table_of(results: Results) -> str:
    """The results as text."""
    sides = {f"ours, {engine}": found["ours"] for engine, found in results["engines"].items()}
    lines = [f"{'':<12}" + "".join(f"{name:>14}" for name in (*PARTS, "rest_share", "tokens_mean"))]
    for name, found in {**sides, "TRL, hf": results[TRL]}.items():
        numbers = "".join(f"{found[part]:14.2f}" for part in PARTS)
        lines.append(f"{name:<12}{numbers}{found['rest_share']:14.1%}{found['tokens_mean']:14.1f}")
        between = ["{:.2f} to {:.2f}".format(*found["ranges"][part]) for part in PARTS]
        lines.append(f"{'  range':<12}" + "".join(f"{text:>14}" for text in between))
    for engine, found in results["engines"].items():
        lines.append(f"TRL takes {spread(found['ratios'])} times as long as ours with {engine}")
    return "\n".join(lines)


@clean_exit()
def main() -> None:
    """Measure, print and write the results."""
    parser = bench_parser("grpo", __doc__, "", "--engines hf --num-steps 8 --output FILE.json")
    parser.add_argument("--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"], help="our engines")
    parser.add_argument("--ranks", type=IntArg(), default=1, help=f"processes of each side, a divisor of {PROMPTS}")
    parser.add_argument("--rounds", type=IntArg(), default=3, help="runs of each side")
    parser.add_argument("--num-steps", type=IntArg(2), default=4, help="steps of each run; the first is excluded")
    arguments = parser.parse_args()
    if PROMPTS % arguments.ranks:
        raise UserError(f"--ranks is {arguments.ranks}; it must divide {PROMPTS}")
    if not MODEL.is_dir():
        raise UserError(f"{MODEL} is missing; run `python -m verl_ext.data.prepare smollm2 --output {MODEL}`")
    results = measure(arguments.engines, arguments.ranks, arguments.rounds, arguments.num_steps)
    print_line(table_of(results))
    write_results(results, arguments.output, ("trl", "accelerate"))


if __name__ == "__main__":
    main()
