"""The controller, the model that it controls and what its choices are worth, as the configuration wants them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.block_importance import Importance, load_importance
from verl_ext.controller.calibration import calibrate, deciding_ms
from verl_ext.controller.checkpoints import load_weights
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.controlled import ControlledModel
from verl_ext.controller.execution import Executor
from verl_ext.controller.latency_model import LATENCY_FILE
from verl_ext.controller.latency_source import LatencySource, MeasuredLatency, ModelledLatency
from verl_ext.controller.loading import fingerprint
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.distributed import on_every_rank, on_rank_zero
from verl_ext.errors import UserError
from verl_ext.plugins import Plugin
from verl_ext.trainer.hardware import pick_precision
from verl_ext.trainer.model import local_model_path
from verl_ext.trainer.stages import BudgetConfig

MEASURED_QUESTIONS = 32
"""On how many questions a latency model is fitted."""


def controlled_model(config: BudgetConfig) -> ControlledModel:
    """The vision-language model of the configuration."""
    controller = config.controller
    return ControlledModel(
        local_model_path(config),
        tuple(controller.tier_sizes),
        controller.max_new_tokens,
        config.data.question_suffix,
        config.model.trust_remote_code,
        num_threads=torch.get_num_threads() if config.trainer.device == "cpu" else None,
        adapter=config.model.adapter,
    )


def make_executor(config: BudgetConfig) -> Executor:
    """The frozen model, whole on every rank."""
    controller, device = config.controller, config.trainer.device
    dtype = pick_precision(controller.dtype, device)
    plugin = own_adapter_of(config)
    return controlled_model(config).executor(device, dtype, plugin, most_encodings=controller.most_encodings)


def own_adapter_of(config: BudgetConfig) -> Plugin | None:
    """The user's own adapter that the recipe names, if it does."""
    named = config.model.adapter
    return None if named is None else Plugin.parse(named, "model.adapter")


def space_of(config: BudgetConfig, adapter: VLMAdapter) -> ConfigurationSpace:
    """What the controller may choose of the model."""
    section = config.controller
    return adapter.space(section.min_active, section.max_active, list(section.topk_choices))


def importance_of(config: BudgetConfig, adapter: VLMAdapter) -> Importance | None:
    """Of the model's blocks, where the configuration names a file."""
    path = config.controller.importance_file
    return None if path is None else load_importance(Path(path).expanduser(), adapter)


def make_controller(
    config: BudgetConfig, executor: Executor, question: ImageQuestion, budgets_ms: tuple[float, float]
) -> BudgetController:
    """A controller that fits the model, its weights new or from `controller.init_from`.

    Args:
        config: the resolved configuration.
        executor: of the model.
        question: any, whose features say how wide they are.
        budgets_ms: least and greatest.
    """
    section, adapter = config.controller, executor.adapter
    vision, language = executor.features(question)
    vlm = {**controlled_model(config).to_dict(), "fingerprint": fingerprint(adapter.model)}
    controller = BudgetController(
        BudgetControllerConfig(
            **vars(space_of(config, adapter)),
            vision_width=len(vision),
            language_width=len(language),
            low_ms=budgets_ms[0],
            high_ms=budgets_ms[1],
            hidden=section.hidden,
            dropout=section.dropout,
            vlm=vlm,
        )
    )
    importance = importance_of(config, adapter)
    if importance is not None:
        controller.prefer(importance.scores)
    if section.init_from is not None:
        load_weights(controller, Path(section.init_from).expanduser())
    return controller


def latency_source(config: BudgetConfig, executor: Executor, questions: Sequence[ImageQuestion]) -> LatencySource:
    """Measured, or by a latency model; collective, for one rank makes that where it is missing."""
    space, sample = space_of(config, executor.adapter), questions[:MEASURED_QUESTIONS]
    if config.latency.source == "measured":
        return MeasuredLatency(deciding_ms(executor, space, sample, config.controller.hidden))
    make = lambda: modelled_latency(config, executor, space, sample)  # noqa: E731
    on_rank_zero(make)  # the others read what it has measured
    return on_every_rank(make)


def modelled_latency(
    config: BudgetConfig, executor: Executor, space: ConfigurationSpace, questions: Sequence[ImageQuestion]
) -> ModelledLatency:
    """By the latency model of `latency.file`, or by the run's own, which is made where it is missing.

    Raises:
        UserError: it was fitted on another model.
    """
    given, adapter = config.latency.file, executor.adapter
    path = Path(config.trainer.default_local_dir) / LATENCY_FILE if given is None else Path(given).expanduser()
    if given is None and not path.is_file():
        controller = config.controller
        sizes = config.latency.configurations, config.latency.repeats, controller.max_new_tokens, controller.hidden
        found = calibrate(adapter, space, questions, *sizes)
        found.save(path)
    return ModelledLatency.load(path, adapter, config.latency.percentile)


def budgets_of(
    config: BudgetConfig, executor: Executor, questions: Sequence[ImageQuestion], latency: LatencySource
) -> tuple[float, float]:
    """Least and greatest budget in milliseconds, as given, or by shares of what all of the model takes.

    Args:
        config: the resolved configuration.
        executor: of the model.
        questions: to run all of it for.
        latency: where milliseconds come from.
    """
    section = config.controller
    if section.budgets_of_full is None:
        low_ms, high_ms = section.budgets_ms
        return low_ms, high_ms
    full = space_of(config, executor.adapter).full
    full_ms = statistics.fmean(latency.of_run(executor.run(each, full)) for each in questions[:MEASURED_QUESTIONS])
    low_ms, high_ms = (share * full_ms for share in section.budgets_of_full)
    return low_ms, high_ms


def check_budgets(
    config: BudgetConfig,
    low_ms: float,
    executor: Executor,
    least: Configuration,
    questions: Sequence[ImageQuestion],
    latency: LatencySource,
) -> None:
    """Refuse budgets that nothing can keep.

    Args:
        config: the resolved configuration.
        low_ms: the least budget.
        executor: of the model.
        least: the cheapest configuration.
        questions: to try it on.
        latency: where milliseconds come from.

    Raises:
        UserError: for most of the questions, the cheapest configuration and the decision to take it exceed the least
            budget.
    """
    executor.run(questions[0], least)  # the first one is not warm
    # as a reward counts it: at the lowest tier, the look that decides is the configuration's own
    taken = sorted(latency.of_run(executor.run_anew(question, least)) + latency.deciding_ms for question in questions)
    needed = taken[len(taken) // 2]
    if low_ms >= needed:
        return
    key, begins, enough = "budgets_ms", f"{low_ms:g} ms", f"{needed * 1.05:.1f} ms"
    if config.controller.budgets_of_full is not None:
        share = config.controller.budgets_of_full[0]
        key, begins = "budgets_of_full", f"{share:g} ({low_ms:.1f} ms)"
        enough = f"{share * needed * 1.05 / low_ms:.3g}"
    raise UserError(
        f"controller.{key} begins at {begins}, but the cheapest configuration takes {needed:.1f} ms, including "
        f"{latency.deciding_ms:.1f} ms for the controller's decision; begin at {enough} or more"
    )
