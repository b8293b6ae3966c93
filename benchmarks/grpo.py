"""A GRPO step, and each part of it: ours beside TRL's `GRPOTrainer`, in one run.

DIRECTORY is one where `pip install --no-deps --target DIRECTORY trl==1.6.0` was run: the newest TRL that works with the
vLLM of this project's environment, in which both are run, each as its users start it.

Both learn from the same few prompts in every step, with the same model (SmolLM2-135M-Instruct, which
`python -m verl_ext.data.prepare smollm2 --output data/smollm2_135m` makes), group size, longest completion, samples in
a forward pass, optimizer, learning rate, loss and reward, without a KL term, gradient checkpointing or correction of
the rollout's probabilities. Nearly all completions reach the longest length; `tokens_mean` says how long they were. The
sides take turns, engine by engine. Of each only the steps after the first count: the first one is not warm.

`generation_s` is drawing, without sending the weights to the engine (`sync_s`). `model_s` is what the update computes:
forward and backward passes and the optimizer. `rest_share` is what is left of a step beside these two.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.command import bench_parser, write_figures
from benchmarks.running import ROOT, run
from verl_ext.argument_types import WholeNumber
from verl_ext.command_line import clean_exit
from verl_ext.errors import UserError
from verl_ext.progress import progress_bar
from verl_ext.tell import tell

MODEL = ROOT / "data" / "smollm2_135m"
PROMPTS = 4
GROUP_SIZE = 8
MICRO_BATCH_SIZE = 8
MAX_TOKENS = 64
MAX_PROMPT_TOKENS = 192
LR = 1e-6
PARTS = ("step_s", "generation_s", "model_s", "sync_s", "reward_s")
QUESTIONS = (
    "A train of {} cars carries {} people in each car. At the next station {} people get off and {} get on, and one "
    "car is left behind empty after its passengers moved to the others. How many people are in each car on average, "
    "and how many seats are free in the train if each car has {} seats? Explain each step before you give the result."
)
Step = dict[str, float]


def write_prompts(path: Path) -> None:
    """Questions of like length in verl's RL format."""
    import pandas as pd  # here, so that --help need not wait for it

    turns = [[{"role": "user", "content": QUESTIONS.format(*range(n + 11, n + 16))}] for n in range(PROMPTS)]
    rows = [
        {"data_source": "benchmark", "prompt": turn, "reward_model": {"style": "rule", "ground_truth": "0"}}
        for turn in turns
    ]
    pd.DataFrame(rows).to_parquet(path)


def our_steps(engine: str, ranks: int, num_steps: int, scratch: Path) -> list[Step]:
    """Our command with its smallest recipe, the steps as its metrics have them."""
    run_dir = scratch / f"ours_{engine}"
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
        "reward.functions": f"[{ROOT}/benchmarks/grpo_reward.py:compute_score]",
        "optim.lr": LR,
        "trainer.total_epochs": num_steps,
        "trainer.total_training_steps": num_steps,
        "trainer.save_freq": -1,
        "trainer.checkpoint.save_contents": "[model]",
        "trainer.log_samples_every": 0,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": run_dir,
    }
    run(["bash", "run_grpo.sh", str(ranks), *(f"{key}={value}" for key, value in settings.items())])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [our_step(row) for row in rows if "time/train/update_s" in row]


def our_step(row: Step) -> Step:
    """A line of metrics.jsonl by the names of this benchmark."""
    return {
        "step_s": row["time/train/step_s"],
        "generation_s": row["time/train/rollout_s"],
        "model_s": row["time/train/update_s"],
        "sync_s": row.get("weights/sync_s", 0.0),
        "reward_s": row["time/train/reward_s"],
        "tokens_mean": row["train/seq_completion_len_mean"],
    }


def peer_steps(engine: str, ranks: int, num_steps: int, scratch: Path, peer: Path) -> tuple[list[Step], dict[str, str]]:
    """TRL's trainer, started as torchrun starts it; its steps and the versions."""
    job = {
        "engine": engine,
        "model": str(MODEL),
        "prompts": str(scratch / "prompts.parquet"),
        "output": str(scratch / f"peer_{engine}"),
        "num_steps": num_steps,
        "group_size": GROUP_SIZE,
        "num_samples": PROMPTS * GROUP_SIZE // ranks,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "max_tokens": MAX_TOKENS,
        "max_model_len": MAX_PROMPT_TOKENS + MAX_TOKENS,
        "lr": LR,
    }
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.side", "grpo_peer", str(path)]
    output = run(command, PYTHONPATH=f"{peer}{os.pathsep}{ROOT}")
    lines = [line.split(" ", 1) for line in output.splitlines() if line.startswith(("STEP ", "ABOUT "))]
    versions = next(json.loads(text) for kind, text in lines if kind == "ABOUT")
    return [json.loads(text) for kind, text in lines if kind == "STEP"], versions


def summary_of(steps: list[Step]) -> dict[str, Any]:
    """Medians of all steps but the first, with the steps themselves."""
    warm = steps[1:]
    medians = {name: statistics.median(step.get(name, 0.0) for step in warm) for name in (*PARTS, "tokens_mean")}
    known = [step["generation_s"] + step["model_s"] for step in warm]
    rest = [1 - seconds / step["step_s"] for seconds, step in zip(known, warm)]
    return {**medians, "rest_share": statistics.median(rest), "steps": steps}


def bar_over(engines: list[str]) -> Any:
    """A bar of both sides' runs with each engine."""
    return progress_bar(total=2 * len(engines), desc="runs", unit="runs")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All figures of the run."""
    engines: dict[str, Any] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name, bar_over(arguments.engines) as bar:
        scratch = Path(name)
        write_prompts(scratch / "prompts.parquet")
        for engine in arguments.engines:
            bar.set_description(f"ours, {engine}")
            ours = summary_of(our_steps(engine, arguments.ranks, arguments.num_steps, scratch))
            bar.update()
            bar.set_description(f"TRL, {engine}")
            steps, versions = peer_steps(engine, arguments.ranks, arguments.num_steps, scratch, arguments.peer)
            theirs = summary_of(steps)
            bar.update()
            engines[engine] = {"ours": ours, "trl": theirs, "trl_over_ours": theirs["step_s"] / ours["step_s"]}
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
        lines.append(f"{engine}: TRL takes {found['trl_over_ours']:.2f} times as long")
    return "\n".join(lines)


@clean_exit()
def main() -> None:
    """Measure, print the figures and write them."""
    parser = bench_parser(
        "grpo", __doc__, "--peer peers/trl", "--peer peers/trl --engines hf --num-steps 8 --output FILE.json"
    )
    parser.add_argument("--peer", type=Path, metavar="DIR", required=True, help="directory that TRL was installed into")
    parser.add_argument(
        "--engines", nargs="+", choices=("hf", "vllm"), default=["hf", "vllm"], help="what completions are drawn by"
    )
    parser.add_argument(
        "--ranks", type=WholeNumber(), default=1, help=f"processes of each side, a divisor of {PROMPTS}"
    )
    parser.add_argument("--num-steps", type=WholeNumber(2), default=4, help="of each run; the first is left out")
    arguments = parser.parse_args()
    if not (arguments.peer / "trl").is_dir():
        raise UserError(
            f"{arguments.peer} has no TRL; run `pip install --no-deps --target {arguments.peer} trl==1.6.0`"
        )
    if not MODEL.is_dir():
        raise UserError(f"{MODEL} is missing; run `python -m verl_ext.data.prepare smollm2 --output {MODEL}`")
    if PROMPTS % arguments.ranks:
        raise UserError(f"--ranks is {arguments.ranks}; it must divide {PROMPTS}")
    arguments.peer = arguments.peer.absolute()
    figures = measure(arguments)
    tell(table_of(figures))
    write_figures(figures, arguments.output)


if __name__ == "__main__":
    main()
