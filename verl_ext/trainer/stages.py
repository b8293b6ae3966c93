"""The stages by name. Each is imported on demand: what one needs, another may do without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_ext.metrics.run_record import RunRecord


@dataclass(frozen=True)
class Stage:
    """What differs between stages when a rank starts.

    Attributes:
        trainer: the class.
        load_datasets: training and validation set; the arguments are the first ones of `data.load.load_datasets`.
        keeps_tokens: whether what one rank of a node has loaded is there for its others.
    """

    trainer: Callable[..., Any]
    load_datasets: Callable[..., tuple[Any, Any]]
    keeps_tokens: bool = False


def with_first_start(load: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Gives a chat template that asks for the date that of the run's first start: a resumed run has the same tokens."""

    def load_of_run(config: DictConfig, tokenizer: Any, progress: bool = False) -> tuple[Any, Any]:
        return load(config, tokenizer, progress, RunRecord(Path(config.trainer.default_local_dir)).first_start())

    return load_of_run


def load_stage(name: str) -> Stage:
    """The stage of a configuration's `stage`."""
    if name == "vlm_sft":
        from verl_ext.trainer.vlm_sft import VLMSFTTrainer, load_chats

        return Stage(VLMSFTTrainer, load_chats)
    if name == "budget":
        from verl_ext.data.load import load_questions
        from verl_ext.trainer.budget import BudgetControllerTrainer

        return Stage(BudgetControllerTrainer, load_questions)
    if name == "grpo":
        from verl_ext.data.load import load_prompts
        from verl_ext.trainer.grpo import GRPOTrainer

        return Stage(GRPOTrainer, with_first_start(load_prompts))
    from verl_ext.data.load import load_datasets
    from verl_ext.trainer.sft import SFTTrainer

    return Stage(SFTTrainer, with_first_start(load_datasets), keeps_tokens=True)
