"""What rules must know of a run beside its metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_ext.health.schedule import Schedule, schedule_of

LANGUAGE = frozenset({"sft", "vlm_sft"})
"""Stages whose loss is a cross-entropy."""
REWARDED = frozenset({"grpo", "budget"})
"""Stages that learn from rewards."""


@dataclass(frozen=True)
class Facts:
    """Of one run.

    Attributes:
        stage: sft, vlm_sft, grpo or budget.
        total_steps: of the whole run; None where that is not known.
        schedule: the learning rate by step as the recipe has it; None where none is fixed beforehand.
        max_prompt_length: tokens; None where there is no limit.
        max_response_length: the same of completions.
        samples_per_step: completions that are rewarded in a step, over all ranks; None where that is not known.
        checkpoints: steps of the complete checkpoints on the disk; called when a rule wants to name one.
        untrained_loss: nat/token of random guessing, for a run that began from weights which were never trained; None
            for one that began from pretrained weights.
    """

    stage: str
    total_steps: int | None = None
    schedule: Schedule | None = None
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    samples_per_step: int | None = None
    checkpoints: Callable[[], Sequence[int]] = tuple
    untrained_loss: float | None = None

    @classmethod
    def of(
        cls,
        config: Mapping[str, Any],
        total_steps: int | None,
        steps_per_epoch: int | None,
        checkpoints: Callable[[], Sequence[int]],
        untrained_loss: float | None = None,
    ) -> Facts:
        """From a resolved configuration.

        Args:
            config: as in `config.yaml`.
            total_steps: see above.
            steps_per_epoch: None where that is not known.
            checkpoints: see above.
            untrained_loss: see above; `run.json` has it.
        """
        data, stage = config["data"], config["stage"]
        schedule = schedule_of(config, total_steps, steps_per_epoch)
        facts = cls(stage, total_steps, schedule, checkpoints=checkpoints, untrained_loss=untrained_loss)
        if stage != "grpo":
            return facts
        return replace(
            facts,
            max_prompt_length=data["max_prompt_length"],
            max_response_length=data["max_response_length"],
            samples_per_step=data["train_batch_size"] * config["rollout"]["n"],
        )
