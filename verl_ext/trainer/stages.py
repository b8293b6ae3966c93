"""The stages by name. Each is imported on demand: what one needs, another may do without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stage:
    """What differs between stages when a rank starts.

    Attributes:
        trainer: the class.
        load_datasets: training and validation set; the arguments are those of `data.load.load_datasets`.
        keeps_tokens: whether what one rank of a node has loaded is there for its others.
    """

    trainer: Callable[..., Any]
    load_datasets: Callable[..., tuple[Any, Any]]
    keeps_tokens: bool = False


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
        from verl_ext.trainer.grpo import GRPOTrainer
        from verl_ext.trainer.grpo_parts import load_prompts_of_run

        return Stage(GRPOTrainer, load_prompts_of_run)
    from verl_ext.data.load import load_datasets
    from verl_ext.trainer.sft import SFTTrainer

    return Stage(SFTTrainer, load_datasets, keeps_tokens=True)
