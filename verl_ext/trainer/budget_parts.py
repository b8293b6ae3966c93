"""The controller, the model that it controls and what its choices are worth, as the configuration wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.calibrate import calibrate, doubts
from verl_ext.controller.checkpoints import load_weights
from verl_ext.controller.configuration import Configuration, ConfigurationSpace
from verl_ext.controller.controlled import ControlledModel
from verl_ext.controller.execution import Executor
from verl_ext.controller.importance import Importance, load_importance
from verl_ext.controller.latency_model import LATENCY_FILE
from verl_ext.controller.latency_source import LatencySource, ModelledLatency
from verl_ext.controller.loading import fingerprint
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.data.questions import ImageQuestion
from verl_ext.errors import UserError
from verl_ext.tell import tell
from verl_ext.trainer.hardware import pick_precision
from verl_ext.trainer.model import local_model_path

MEASURED_QUESTIONS = 32
"""On how many questions a latency model is fitted."""


def controlled_model(config: DictConfig) -> ControlledModel:
    """The vision-language model of the configuration."""
    controller = config.controller
    return ControlledModel(
        local_model_path(config),
        tuple(controller.tier_sizes),
        controller.max_new_tokens,
        config.data.question_suffix,
        config.model.trust_remote_code,
    )


def make_executor(config: DictConfig) -> Executor:
    """The frozen model, whole on every rank."""
    controller, device = config.controller, config.trainer.device
    adapter = controlled_model(config).load(device, pick_precision(controller.dtype, device))
    return Executor(adapter, controller.max_new_tokens, most_encodings=controller.most_encodings)


def importance_of(config: DictConfig, adapter: VLMAdapter) -> Importance | None:
    """Of the model's blocks, where the configuration names a file."""
    path = config.controller.importance_file
    return None if path is None else load_importance(Path(path).expanduser(), adapter)


def make_controller(config: DictConfig, executor: Executor, question: ImageQuestion) -> BudgetController:
    """A controller that fits the model, its weights new or from `controller.init_from`.

    Args:
        config: the resolved configuration.
        executor: of the model.
        question: any, whose features say how wide they are.
    """
    section, adapter = config.controller, executor.adapter
    space = adapter.space(section.min_active, section.max_active, list(section.topk_choices))
    vision, language = executor.features(question)
    vlm = {**controlled_model(config).to_dict(), "fingerprint": fingerprint(adapter.model)}
    controller = BudgetController(
        BudgetControllerConfig(
            **vars(space),
            vision_width=len(vision),
            language_width=len(language),
            low_ms=section.budgets_ms[0],
            high_ms=section.budgets_ms[1],
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


def modelled_latency(
    config: DictConfig, executor: Executor, space: ConfigurationSpace, questions: Sequence[ImageQuestion]
) -> ModelledLatency:
    """By the latency model of `latency.file`, or by the run's own, which is made where it is missing.

    Raises:
        UserError: it was fitted on another model.
    """
    given, adapter = config.latency.file, executor.adapter
    path = Path(config.trainer.default_local_dir) / LATENCY_FILE if given is None else Path(given).expanduser()
    if given is None and not path.is_file():
        sizes = config.latency.configurations, config.latency.repeats, config.controller.max_new_tokens
        found = calibrate(adapter, space, questions[:MEASURED_QUESTIONS], *sizes)
        found.save(path)
        tell(
            f"measured {sizes[0]} configurations for {path}; R squared {found.r2:.3f} on those that were not fitted"
            f"{doubts(found.r2)}"
        )
    return ModelledLatency.load(path, adapter)


def check_budgets(
    low_ms: float,
    executor: Executor,
    least: Configuration,
    questions: Sequence[ImageQuestion],
    latency: LatencySource,
) -> None:
    """Refuse budgets that nothing can keep.

    Args:
        low_ms: the least budget.
        executor: of the model.
        least: the cheapest configuration.
        questions: to try it on.
        latency: where milliseconds come from.

    Raises:
        UserError: the least budget is below what the cheapest configuration takes for most of the questions.
    """
    executor.run(questions[0], least)  # the first one is not warm
    taken = sorted(latency.of_run(executor.run_anew(question, least)) for question in questions)
    needed = taken[len(taken) // 2]
    if low_ms < needed:
        raise UserError(
            f"controller.budgets_ms begins at {low_ms:g} ms, but the cheapest configuration takes {needed:.1f} ms; "
            f"begin at {needed * 1.05:.1f} ms or more"
        )
