"""What is evaluated: the controller with its model, loaded as its training had them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eval_pipeline.adaptive.source import ControllerSource
from verl_ext.console import warn
from verl_ext.controller.adapters.base import VLMAdapter
from verl_ext.controller.block_importance import BlockImportance, load_importance
from verl_ext.controller.calibration import machine_warning
from verl_ext.controller.inference import AdaptiveModel
from verl_ext.controller.latency import LATENCY_FILE, ModelledLatency
from verl_ext.controller.network import BudgetController
from verl_ext.controller.space import ConfigurationSpace
from verl_ext.controller.vlm import ControlledModel, default_device, load_controller
from verl_ext.plugins import Plugin

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Subject:
    """A controller with its model.

    Attributes:
        model: answers by the controller's choice.
        controlled: the model as training had it.
        space: that the controller chooses from.
        trained_ms: least and greatest budget of its training, milliseconds.
        importance: of the model's blocks; None where the run had none.
    """

    model: AdaptiveModel
    controlled: ControlledModel
    space: ConfigurationSpace
    trained_ms: tuple[float, float]
    importance: BlockImportance | None

    @property
    def adapter(self) -> VLMAdapter:
        """Of the model."""
        return self.model.runner.adapter


def load_subject(
    source: ControllerSource,
    config: Mapping[str, Any],
    vlm: str | None,
    trust_remote_code: bool = False,
    own_adapter: Plugin | None = None,
) -> Subject:
    """Load a controller and its model.

    Args:
        source: of the controller.
        config: of its run; empty without a run.
        vlm: where the model is by now; None where it was.
        trust_remote_code: whether the model's own code may be run.
        own_adapter: see `ControlledModel.load`.

    Raises:
        UserError: one cannot be loaded, or they do not belong together.
    """
    model, controller, controlled = load_model(
        source, config, vlm, trust_remote_code=trust_remote_code, own_adapter=own_adapter
    )
    file = config.get("controller", {}).get("importance_file")
    adapter = model.runner.adapter
    importance = None if file is None else load_importance(Path(file).expanduser(), adapter)
    trained_ms = controller.config.low_ms, controller.config.high_ms
    return Subject(model, controlled, controller.space, trained_ms, importance)


def load_model(
    source: ControllerSource,
    config: Mapping[str, Any],
    vlm: str | None,
    device: str | None = None,
    trust_remote_code: bool = False,
    own_adapter: Plugin | None = None,
) -> tuple[AdaptiveModel, BudgetController, ControlledModel]:
    """Load a controller and its model, without what only a comparison needs.

    Args:
        source: of the controller.
        config: of its run; empty without a run.
        vlm: where the model is by now; None where it was.
        device: cpu or cuda; None for a GPU if there is one.
        trust_remote_code: whether the model's own code may be run.
        own_adapter: see `ControlledModel.load`.

    Raises:
        UserError: one cannot be loaded, or they do not belong together.
    """
    controller, controlled = load_controller(source.export, vlm, trust_remote_code)
    usual, dtype = default_device()
    dtype = DTYPES.get(config.get("controller", {}).get("dtype"), dtype)
    runner = controlled.runner(usual if device is None else device, dtype, own_adapter)
    return AdaptiveModel(runner, controller), controller, controlled


def load_latency(source: ControllerSource, config: Mapping[str, Any], adapter: VLMAdapter) -> ModelledLatency:
    """By the latency model that the run's rewards came from.

    Raises:
        UserError: there is none, or it is of another model.
    """
    named = config.get("latency", {}).get("file")
    path = (source.run_dir or source.export) / LATENCY_FILE if named is None else Path(named).expanduser()
    latency = ModelledLatency.load(path, adapter)
    if (doubt := machine_warning(latency.model, adapter)) is not None:
        warn(doubt)
    return latency
