"""What a finished run tells its user: what was learnt, where everything lies, what to do next."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.checkpoint.layout import EXPORT, list_steps
from verl_ext.metrics.jsonl import METRICS_FILE, iterate_metrics


def print_summary(config: DictConfig) -> None:
    """Print the summary of a finished run from its files."""
    run_dir = Path(config.trainer.default_local_dir)
    lines = [f"Finished: {config.trainer.experiment_name} ({config.stage})", *learnt(run_dir / METRICS_FILE)]
    lines += [f"  run directory   {run_dir}  (metrics.jsonl, *_history.csv, tensorboard/, run.json, config.yaml)"]
    checkpoints = list_steps(run_dir)
    if checkpoints:
        lines.append(f"  last checkpoint {checkpoints[0]}")
    if checkpoints and any((checkpoints[0] / EXPORT).glob("*.safetensors")):
        lines.append(f"  Hugging Face    {checkpoints[0] / EXPORT}")
        lines.append(f"Next: {Path(sys.executable)} -m eval_pipeline run --checkpoint {checkpoints[0]}")
    print("\n".join(lines), flush=True)


def learnt(path: Path) -> list[str]:
    """First and last value of the losses, over all attempts."""
    first: dict[str, tuple[int, float]] = {}
    last: dict[str, tuple[int, float]] = {}
    for row in iterate_metrics(path) if path.is_file() else ():
        for name in ("train/loss", "val/loss"):
            if name in row:
                first.setdefault(name, (row["step"], row[name]))
                last[name] = (row["step"], row[name])
    return [
        f"  {name:15} {first[name][1]:.4f} at step {first[name][0]} -> {last[name][1]:.4f} at step {last[name][0]}"
        for name in first
    ]
