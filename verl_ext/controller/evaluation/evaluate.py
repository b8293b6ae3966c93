"""The evaluation of a controller: load, check, measure, compare, write."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from verl_ext.console import print_line, print_summary, typed_path, warn
from verl_ext.controller.adapters import VLMAdapter
from verl_ext.controller.evaluation.measure import ControllerBenchmark
from verl_ext.controller.evaluation.report import (
    TABLE_FILE,
    console_report,
    log_to_wandb,
    require_writable,
    write_report,
)
from verl_ext.controller.evaluation.results import ALLOWED_VIOLATIONS, ControllerComparison, compare
from verl_ext.controller.evaluation.statics import static_configurations
from verl_ext.controller.importance import load_importance
from verl_ext.controller.inference import AdaptiveModel, load_adaptive_model
from verl_ext.controller.latency import (
    LATENCY_FILE,
    LatencySource,
    MeasuredLatency,
    ModeledLatency,
    machine_name,
    require_reachable,
    warn_of_other_machine,
)
from verl_ext.controller.source import ControllerSource
from verl_ext.controller.space import cheapest_configuration
from verl_ext.controller.vlm import ControlledModel
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, ImageQuestionDataset, metric_of, require_no_placeholders
from verl_ext.errors import UserError
from verl_ext.plugins import Plugin

EVALUATED_PERCENTILE = 50
"""Percentile of `--latency model`: the expected latency, so that a margin in the training's percentile shows."""


@dataclass(frozen=True)
class AdaptiveEvalConfig:
    """The options of `eval_pipeline adaptive`; see its `--help`."""

    budgets: list[float]
    num_budgets: int
    questions: Path | None
    metric: str | None
    images: Path | None
    num_samples: int
    num_train: int
    max_static: int
    search_questions: int
    repeats: int
    seed: int
    latency: str
    vlm: str | None
    trust_remote_code: bool
    adapter: Plugin | None


def evaluate(source: ControllerSource, config: AdaptiveEvalConfig, output: Path, wandb: bool) -> None:
    """Compare a controller with baselines, print the tables, and write the files to the directory `output`.

    Raises:
        UserError: a file is missing, or does not fit the controller.
    """
    model, controlled = load_adaptive_model(
        source, config.vlm, trust_remote_code=config.trust_remote_code, custom_adapter=config.adapter
    )
    adapter, space, file = model.runner.adapter, model.space, source.setting("controller", "importance_file")
    scores = None if file is None else load_importance(file, adapter)
    train, held_out = load_questions(source, config, controlled.question_suffix)
    require_no_placeholders([*train, *held_out], adapter.processor)
    latency = latency_source(source, config.latency, adapter)
    budgets = choose_budgets(config, model.trained_ms)
    benchmark = ControllerBenchmark(
        model, cheapest_configuration(space, scores), budgets, latency, config.repeats, config.seed
    )
    setting = "--budgets" if config.budgets else "the default of --budgets"
    require_reachable(setting, budgets[0], benchmark.measure_cheapest(held_out))
    require_writable(output)
    statics = static_configurations(model, scores, train, budgets, config.max_static, config.search_questions)
    comparison = compare(benchmark.run(statics, train, held_out), space, statics, budgets)
    info = describe_evaluation(source, config, model, controlled, comparison)
    write_report(output, comparison, info, source)
    print_line(console_report(comparison))
    rows = {"report": typed_path(output / TABLE_FILE), "results": typed_path(output)}
    print_summary(f"Finished: comparison of {source.label}", rows)
    if wandb:
        log_to_wandb(comparison, info, source, output)


def load_questions(
    source: ControllerSource, config: AdaptiveEvalConfig, suffix: str
) -> tuple[list[ImageQuestion], list[ImageQuestion]]:
    """Load training and held-out questions, the same number from each dataset, with the suffix appended.

    Raises:
        UserError: no dataset is given, or a dataset cannot be read.
    """
    datasets = source.setting("data", "datasets") or {}
    sources = {name: QuestionSource(**each) for name, each in datasets.items()}
    if config.questions is not None:
        metrics = {metric_of(name, each) for name, each in sources.items()}
        metric = config.metric or (metrics.pop() if len(metrics) == 1 else None)
        images = None if config.images is None else str(config.images)
        sources = {"questions": QuestionSource(source=str(config.questions), metric=metric, images=images)}
    if not sources:
        raise UserError("no questions are given; set --questions to a folder with train*.parquet and val*.parquet")

    max_unreadable = source.setting("data", "max_unreadable_images") or 0

    def load(split: str, num_questions: int) -> list[ImageQuestion]:
        sizes = {name: each.size(split) for name, each in sources.items() if each.size(split)}
        share = -(-num_questions // max(len(sizes), 1))
        limits = {name: share if size < 0 else min(size, share) for name, size in sizes.items()}
        limited = {name: QuestionSource(**{**vars(sources[name]), split: limit}) for name, limit in limits.items()}
        dataset = ImageQuestionDataset(limited, split, suffix, max_unreadable, progress=True)
        return dataset.samples[:num_questions]

    return load("train", config.num_train), load("val", config.num_samples)


def latency_source(source: ControllerSource, kind: str, adapter: VLMAdapter) -> LatencySource:
    """Measured latency, or the run's latency model at `EVALUATED_PERCENTILE`; `kind` is `--latency`.

    Raises:
        UserError: the latency model is missing, or belongs to another vision-language model.
    """
    if kind != "model":
        return MeasuredLatency()
    file = source.setting("latency", "file")
    path = (source.run_dir or source.export) / LATENCY_FILE if file is None else Path(file).expanduser()
    latency = ModeledLatency.load(path, adapter, EVALUATED_PERCENTILE)
    warn_of_other_machine(latency.model, adapter)
    return latency


def choose_budgets(config: AdaptiveEvalConfig, trained_ms: tuple[float, float]) -> list[float]:
    """The budgets in ascending order; warns about budgets outside the controller's training range."""
    low, high = trained_ms
    if not config.budgets:
        return np.linspace(low, high, config.num_budgets).tolist()
    budgets = sorted(set(config.budgets))
    if untrained := [f"{budget:g}" for budget in budgets if not low <= budget <= high]:
        warn(f"the controller was trained for {low:g} to {high:g} ms, not for {', '.join(untrained)}")
    return budgets


def describe_evaluation(
    source: ControllerSource,
    config: AdaptiveEvalConfig,
    model: AdaptiveModel,
    controlled: ControlledModel,
    comparison: ControllerComparison,
) -> dict[str, Any]:
    """How the results were obtained, as plain values."""
    measured, adapter = comparison.measured, model.runner.adapter
    protocol = {
        "latency": config.latency,
        "latency_percentile": None if config.latency == "measured" else EVALUATED_PERCENTILE,
        "trained_latency_percentile": source.setting("latency", "percentile"),
        "batch_size": 1,
        "repeats": config.repeats,
        "seed": config.seed,
        "num_samples": len(measured.statics.accuracy),
        "num_train": len(measured.train.accuracy),
        "questions": source.setting("data", "datasets") if config.questions is None else str(config.questions),
        "allowed_violation_rate": ALLOWED_VIOLATIONS,
        "questions_for_blocks": min(config.search_questions, len(measured.train.accuracy)),
        "importance_file": source.setting("controller", "importance_file"),
        "trained_budgets_ms": list(model.trained_ms),
    }
    return {
        "checkpoint": str(source.export),
        "step": source.step,
        "vlm": controlled.to_dict(),
        "space": asdict(model.space),
        "protocol": protocol,
        "machine": {
            "device": machine_name(adapter),
            "dtype": str(adapter.model.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
