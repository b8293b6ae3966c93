"""An evaluation of a controller from top to bottom: load, check, measure, compare, write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from verl_ext.console import print_line, print_summary, typed_path, warn
from verl_ext.controller.block_importance import load_importance
from verl_ext.controller.calibration import machine_name, machine_warning
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
from verl_ext.controller.inference import AdaptiveModel, load_adaptive_model
from verl_ext.controller.latency import (
    LATENCY_FILE,
    LatencySource,
    MeasuredLatency,
    ModelledLatency,
    require_reachable,
)
from verl_ext.controller.source import ControllerSource
from verl_ext.controller.space import cheapest_configuration
from verl_ext.controller.vlm import ControlledModel
from verl_ext.data.config import QuestionSource
from verl_ext.data.image_questions import ImageQuestion, ImageQuestionDataset
from verl_ext.errors import UserError
from verl_ext.plugins import Plugin


@dataclass(frozen=True)
class AdaptiveEvalConfig:
    """The options of the command.

    Attributes:
        budgets_ms: milliseconds; empty for `num_budgets` evenly over the controller's range.
        num_budgets: number of budgets.
        questions: a folder to use instead of the run's data sets.
        num_samples: held-out questions.
        num_train: training questions, for the lookup table.
        max_static: size of the grid of static configurations.
        num_searched: training questions on which its blocks are searched; 0 keeps the most important blocks.
        repeats: runs of each configuration, of which the median counts.
        seed: of the random configurations.
        latency: measured or model.
        vlm: path of the vision-language model; None for its path in training.
        trust_remote_code: whether the model's own code may run.
        adapter: the user's adapter.
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


def evaluate(source: ControllerSource, config: AdaptiveEvalConfig, output: Path, wandb: bool) -> None:
    """Compare a controller with its baselines, print the tables and write the files.

    Args:
        source: of the controller.
        config: the options.
        output: directory for the files.
        wandb: whether to log to W&B.

    Raises:
        UserError: a file is missing, or does not fit the controller.
    """
    run_config = source.config()
    loaded = LoadedController.load(source, run_config, config)
    train, held_out = load_questions(run_config, config, loaded.controlled.question_suffix)
    latency = latency_source(source, run_config, config, loaded)
    budgets = choose_budgets(config, loaded.model.trained_ms)
    cheapest = cheapest_configuration(loaded.model.space, loaded.scores)
    benchmark = ControllerBenchmark(loaded.model, cheapest, budgets, latency, config.repeats, config.seed)
    require_reachable("--budgets", budgets[0], benchmark.measure_cheapest(held_out))
    require_writable(output)
    statics = static_configurations(loaded.model, loaded.scores, train, budgets, config.max_static, config.num_searched)
    comparison = compare(benchmark.run(statics, train, held_out), statics, budgets)
    info = describe_evaluation(source, run_config, config, loaded, comparison)
    write_report(output, comparison, loaded.model.space, info, source)
    print_line(console_report(comparison))
    rows = {"report": typed_path(output / TABLE_FILE), "results": typed_path(output)}
    print_summary(f"Finished: comparison of {source.label}", rows)
    if wandb:
        log_to_wandb(comparison, info, source, output)


@dataclass(frozen=True)
class LoadedController:
    """A controller with its model, as in training.

    Attributes:
        model: answers by the controller's choice.
        controlled: how the model was asked in training.
        scores: importance of the model's blocks; None if the run had no file of it.
    """

    model: AdaptiveModel
    controlled: ControlledModel
    scores: Mapping[int, float] | None

    @classmethod
    def load(
        cls, source: ControllerSource, run_config: Mapping[str, Any], config: AdaptiveEvalConfig
    ) -> LoadedController:
        """Load a controller, its model and the importance of its blocks.

        Raises:
            UserError: one of them cannot be loaded, or they do not belong together.
        """
        model, controlled = load_adaptive_model(
            source,
            run_config,
            vlm=config.vlm,
            trust_remote_code=config.trust_remote_code,
            own_adapter=config.adapter,
        )
        file = run_config.get("controller", {}).get("importance_file")
        if file is None:
            return cls(model, controlled, None)
        return cls(model, controlled, load_importance(Path(file).expanduser(), model.runner.adapter).scores)


def load_questions(
    run_config: Mapping[str, Any], config: AdaptiveEvalConfig, suffix: str
) -> tuple[list[ImageQuestion], list[ImageQuestion]]:
    """Training questions and held-out ones, equally many of each data set.

    Args:
        run_config: of the run; empty without a run.
        config: the options.
        suffix: appended to every question.

    Raises:
        UserError: no data set is given, or one cannot be read.
    """
    data = run_config.get("data", {})
    if config.questions is not None:
        sources = {"questions": QuestionSource(source=str(config.questions))}
    else:
        sources = {name: QuestionSource(**each) for name, each in (data.get("datasets") or {}).items()}
    if not sources:
        raise UserError("no questions are named; give --questions FOLDER with train*.parquet and val*.parquet")

    def load(split: str, num_questions: int) -> list[ImageQuestion]:
        used = {name: each for name, each in sources.items() if each.size(split) != 0}
        share = -(-num_questions // max(len(used), 1))
        limited = {name: _limit(each, split, share) for name, each in used.items()}
        dataset = ImageQuestionDataset(limited, split, suffix, data.get("max_unreadable_images", 0), progress=True)
        return dataset.samples[:num_questions]

    return load("train", config.num_train), load("val", config.num_samples)


def _limit(source: QuestionSource, split: str, num_questions: int) -> QuestionSource:
    size = source.size(split)
    limit = num_questions if size < 0 else min(size, num_questions)
    return replace(source, **dict[str, Any]({split: limit}))


def latency_source(
    source: ControllerSource, run_config: Mapping[str, Any], config: AdaptiveEvalConfig, loaded: LoadedController
) -> LatencySource:
    """Measured latency, or the latency model of the run's rewards.

    Raises:
        UserError: the latency model is missing, or of another vision-language model.
    """
    if config.latency != "model":
        return MeasuredLatency()
    file, adapter = run_config.get("latency", {}).get("file"), loaded.model.runner.adapter
    path = (source.run_dir or source.export) / LATENCY_FILE if file is None else Path(file).expanduser()
    latency = ModelledLatency.load(path, adapter)
    if (warning := machine_warning(latency.model, adapter)) is not None:
        warn(warning)
    return latency


def choose_budgets(config: AdaptiveEvalConfig, trained_ms: tuple[float, float]) -> list[float]:
    """The budgets, ascending; warns of those that the controller was not trained for."""
    low, high = trained_ms
    if not config.budgets_ms:
        return np.linspace(low, high, config.num_budgets).tolist()
    budgets = sorted(set(config.budgets_ms))
    if untrained := [f"{budget:g}" for budget in budgets if not low <= budget <= high]:
        warn(f"the controller was trained for {low:g} to {high:g} ms, and not for {', '.join(untrained)}")
    return budgets


def describe_evaluation(
    source: ControllerSource,
    run_config: Mapping[str, Any],
    config: AdaptiveEvalConfig,
    loaded: LoadedController,
    comparison: ControllerComparison,
) -> dict[str, Any]:
    """How the results were obtained, as plain values."""
    measured, adapter = comparison.measured, loaded.model.runner.adapter
    datasets = run_config.get("data", {}).get("datasets")
    protocol = {
        "latency": config.latency,
        "deciding": "measured" if config.latency == "measured" else "the encoding of the image alone",
        "batch_size": 1,
        "repeats": config.repeats,
        "seed": config.seed,
        "num_samples": len(measured.statics.accuracy),
        "num_train": len(measured.train.accuracy),
        "questions": datasets if config.questions is None else str(config.questions),
        "allowed_violation_rate": ALLOWED_VIOLATIONS,
        "questions_for_blocks": min(config.num_searched, len(measured.train.accuracy)),
        "importance_file": run_config.get("controller", {}).get("importance_file"),
        "trained_budgets_ms": list(loaded.model.trained_ms),
    }
    return {
        "checkpoint": str(source.export),
        "step": source.step,
        "vlm": loaded.controlled.to_dict(),
        "space": asdict(loaded.model.space),
        "protocol": protocol,
        "machine": {
            "device": machine_name(adapter),
            "dtype": str(adapter.model.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
