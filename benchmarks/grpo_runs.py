"""What `benchmarks.grpo` runs: our command and TRL's trainer, each on the same prompts with the same settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.running import ROOT, run

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
Step = dict[str, float]
"""Seconds of a step and of its parts, and `tokens_mean` of its completions."""


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


def peer_steps(ranks: int, num_steps: int, scratch: Path) -> tuple[list[Step], dict[str, str]]:
    """TRL's trainer, started as torchrun starts it; its steps and the versions."""
    job = {
        "model": str(MODEL),
        "prompts": str(scratch / "prompts.parquet"),
        "output": str(scratch / "peer"),
        "num_steps": num_steps,
        "group_size": GROUP_SIZE,
        "num_samples": PROMPTS * GROUP_SIZE // ranks,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "max_tokens": MAX_TOKENS,
        "lr": LR,
    }
    path = scratch / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.side", "grpo_peer", str(path)]
    output = run(command, PYTHONPATH=str(ROOT))
    lines = [line.split(" ", 1) for line in output.splitlines() if line.startswith(("STEP ", "ABOUT "))]
    versions = next(json.loads(text) for kind, text in lines if kind == "ABOUT")
    return [json.loads(text) for kind, text in lines if kind == "STEP"], versions
