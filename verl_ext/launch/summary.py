"""What a finished run tells its user: what was learnt, where everything lies, what to do next."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.checkpoint.layout import EXPORT, read_tracker
from verl_ext.metrics.jsonl import METRICS_FILE, iterate_metrics
from verl_ext.summary import tell_summary

LEARNT = ("train/loss", "val/loss", "eval/reward_total_mean", "eval/accuracy_mean", "eval/budget_violation_mean")
"""Metrics of which the first and the last value are told, where a run has them."""


def print_summary(config: DictConfig) -> None:
    """Print the summary of a finished run from its files."""
    run_dir = Path(config.trainer.default_local_dir).absolute()
    rows = learnt(run_dir / METRICS_FILE)
    rows["run directory"] = f"{run_dir}  (metrics.jsonl, *_history.csv, tensorboard/, run.json, config.yaml)"
    # by the tracker: a former run of the same directory may have left checkpoints of higher steps
    checkpoint, _ = read_tracker(run_dir)
    then: list[str] = []
    if checkpoint is not None:
        rows["last checkpoint"] = str(checkpoint)
        if any((checkpoint / EXPORT).glob("*.safetensors")):
            rows["Hugging Face"] = str(checkpoint / EXPORT)
            then = next_command(config, run_dir, checkpoint / EXPORT)
    tell_summary(f"Finished: {config.trainer.experiment_name} ({config.stage})", rows, then)


def next_command(config: DictConfig, run_dir: Path, export: Path) -> list[str]:
    """What to type after a run of this stage."""
    evaluate = [sys.executable, "-m", "eval_pipeline"]
    if config.stage == "vlm_sft":
        ranks = str(config.trainer.n_gpus_per_node)
        return ["bash", "run_grpo.sh", ranks, "recipe=budget_controller", f"model.sft_run={run_dir}"]
    if config.stage == "budget":
        adapter = [] if config.model.adapter is None else ["--adapter", config.model.adapter]
        return [*evaluate, "adaptive", "--checkpoint", str(export), *adapter]
    began = str(config.model.partial_pretrain)
    if config.eval.watch and Path(began, "config.json").is_file():  # a watcher is at work, or was
        evaluate += ["report", str(run_dir), "--baseline", began]
    else:
        evaluate += ["watch", str(run_dir)]
    recipe = config.eval.recipe or ""  # a file must be named again: what a run's directory says is not relied upon
    return [*evaluate, *(("--recipe", recipe) if recipe.endswith((".yaml", ".yml")) else ())]


def learnt(path: Path) -> dict[str, str]:
    """First and last value of `LEARNT` on the way to the last step, without rows that a later attempt overtook."""
    values: dict[str, dict[int, float]] = {name: {} for name in LEARNT}
    attempt = None
    for row in iterate_metrics(path) if path.is_file() else ():
        if row["attempt"] != attempt:  # a later attempt replaces all from its first row on
            attempt = row["attempt"]
            values = {name: {s: v for s, v in old.items() if s < row["step"]} for name, old in values.items()}
        for name in values.keys() & row.keys():
            values[name][row["step"]] = row[name]
    return {name: describe_change(series) for name, series in values.items() if series}


def describe_change(series: dict[int, float]) -> str:
    """The first and the last of the values by step."""
    first, last = min(series), max(series)
    return f"{series[first]:.4f} at step {first} -> {series[last]:.4f} at step {last}"
