"""What `adaptive` does, from the checkpoint to the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from eval_pipeline.adaptive.baselines import ALLOWED_VIOLATIONS
from eval_pipeline.adaptive.compare import Comparison, compare
from eval_pipeline.adaptive.files import TABLE_FILE, try_out, write_comparison
from eval_pipeline.adaptive.measure import Bench, Plan
from eval_pipeline.adaptive.questions import load_questions
from eval_pipeline.adaptive.source import ControllerSource
from eval_pipeline.adaptive.statics import statics_for
from eval_pipeline.adaptive.subject import Subject, load_latency, load_subject
from eval_pipeline.adaptive.text import console_text
from eval_pipeline.adaptive.tracking import track
from verl_ext.console import print_line, print_summary, typed_path, warn
from verl_ext.controller.calibration import machine_name
from verl_ext.controller.latency import LatencySource, MeasuredLatency
from verl_ext.plugins import Plugin


@dataclass(frozen=True)
class Settings:
    """What is asked for on the command line.

    Attributes:
        budgets_ms: milliseconds; empty for `num_budgets` over the controller's range.
        num_budgets: see above.
        questions: a folder in the place of the run's data sets.
        num_samples: held-out questions.
        num_train: training questions, for the lookup table.
        max_static: static configurations.
        num_searched: training questions by which their blocks are chosen; 0 for the most important ones.
        repeats: runs of each, of which the median counts.
        seed: of the configurations that are drawn.
        latency: measured or model.
        vlm: where the model is by now.
        trust_remote_code: whether the model's own code may be run.
        adapter: of the user's own.
    """

    budgets_ms: tuple[float, ...] = ()
    num_budgets: int = 8
    questions: Path | None = None
    num_samples: int = 200
    num_train: int = 100
    max_static: int = 36
    num_searched: int = 48
    repeats: int = 1
    seed: int = 0
    latency: str = "measured"
    vlm: str | None = None
    trust_remote_code: bool = False
    adapter: Plugin | None = None


def evaluate(source: ControllerSource, settings: Settings, output: Path, wandb: bool) -> None:
    """Run everything, print the tables and write the files.

    Args:
        source: of the controller.
        settings: what is asked for.
        output: directory for the files.
        wandb: whether W&B gets them too.

    Raises:
        UserError: something that is needed is missing or does not fit.
    """
    config = source.config()
    subject = load_subject(source, config, settings.vlm, settings.trust_remote_code, settings.adapter)
    sizes = {"train": settings.num_train, "val": settings.num_samples}
    samples = load_questions(config, settings.questions, subject.controlled.question_suffix, sizes)
    latency: LatencySource = MeasuredLatency()
    if settings.latency == "model":
        latency = load_latency(source, config, subject.adapter)
    budgets = budgets_of(settings, subject.trained_ms)
    Bench(subject, Plan((), budgets), latency).check_budgets(samples["val"])
    try_out(output)
    statics = statics_for(subject, samples["train"], budgets, settings.max_static, settings.num_searched)
    bench = Bench(subject, Plan(statics, budgets, settings.repeats, settings.seed), latency)
    comparison = compare(bench.run(samples["train"], samples["val"]), statics, budgets)
    about = about_evaluation(source, subject, settings, config, comparison)
    write_comparison(output, comparison, subject.space, about, source)
    print_line(console_text(comparison))
    rows = {"report": typed_path(output / TABLE_FILE), "results": typed_path(output)}
    print_summary(f"Finished: comparison of {source.label}", rows)
    if wandb:
        track(comparison, about, source, output)


def budgets_of(settings: Settings, trained_ms: tuple[float, float]) -> list[float]:
    """The budgets, ascending; a warning of those that the controller was not trained for."""
    low, high = trained_ms
    if not settings.budgets_ms:
        return np.linspace(low, high, settings.num_budgets).tolist()
    budgets = sorted(set(settings.budgets_ms))
    if strangers := [f"{budget:g}" for budget in budgets if not low <= budget <= high]:
        warn(f"the controller was trained for {low:g} to {high:g} ms, and not for {', '.join(strangers)}")
    return budgets


def about_evaluation(
    source: ControllerSource,
    subject: Subject,
    settings: Settings,
    config: Mapping[str, Any],
    comparison: Comparison,
) -> dict[str, Any]:
    """What the figures were made by, as plain values."""
    measured, files = comparison.measured, config.get("data", {}).get("datasets")
    protocol = {
        "latency": settings.latency,
        "deciding": "measured" if settings.latency == "measured" else "the encoding of the image alone",
        "batch_size": 1,
        "repeats": settings.repeats,
        "seed": settings.seed,
        "num_samples": len(measured.statics.accuracy),
        "num_train": len(measured.train.accuracy),
        "questions": files if settings.questions is None else str(settings.questions),
        "allowed_violation_rate": ALLOWED_VIOLATIONS,
        "questions_for_blocks": min(settings.num_searched, len(measured.train.accuracy)),
        "importance_file": config.get("controller", {}).get("importance_file"),
        "trained_budgets_ms": list(subject.trained_ms),
    }
    versions: Sequence[Any] = (torch, transformers)
    return {
        "checkpoint": str(source.export),
        "step": source.step,
        "vlm": subject.controlled.to_dict(),
        "space": asdict(subject.space),
        "protocol": protocol,
        "machine": {
            "device": machine_name(subject.adapter),
            "dtype": str(subject.adapter.model.dtype).removeprefix("torch."),
            **{module.__name__: module.__version__ for module in versions},
        },
    }
