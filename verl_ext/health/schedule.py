"""The learning rate that a recipe asks for, step by step; written from its definition, to be held beside what was used.

The schedules are those of verl 0.7.0 (`verl.utils.torch_functional`): linear warm-up from 0, then constant, cosine, or
warm-up, stable, decay (9 tenths of what is left are stable).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STABLE_SHARE = 0.9


@dataclass(frozen=True)
class Schedule:
    """Of one run.

    Attributes:
        peak: learning rate after the warm-up.
        kind: constant, cosine or wsd.
        warmup: updates.
        length: updates of the whole schedule.
        min_ratio: least share of the peak.
        num_cycles: of the cosine; a half ends at its least.
        updates_per_step: optimizer updates in a step.
    """

    peak: float
    kind: str
    warmup: int
    length: int
    min_ratio: float = 0.0
    num_cycles: float = 0.5
    updates_per_step: int = 1

    def at(self, step: int, num_skipped: int = 0) -> float:
        """Learning rate that a step uses.

        Args:
            step: counted from 1.
            num_skipped: steps before it without an update, which leave the schedule where it is.
        """
        return self.peak * self._share((step - 1 - num_skipped) * self.updates_per_step)

    def _share(self, update: int) -> float:
        if update < self.warmup:
            return update / max(1, self.warmup)
        if self.kind == "constant":
            return 1.0
        left = self.length - self.warmup
        stable = int(left * STABLE_SHARE) if self.kind == "wsd" else 0
        after = update - self.warmup - stable
        if after < 0:
            return 1.0
        if self.kind == "wsd" and update >= self.length:
            return self.min_ratio
        cosine = math.cos(2 * math.pi * self.num_cycles * after / max(1, left - stable))
        return self.min_ratio + (1 - self.min_ratio) * max(0.0, (1 + cosine) / 2)


def schedule_of(config: Mapping[str, Any], total_steps: int | None, steps_per_epoch: int | None) -> Schedule | None:
    """The schedule of a resolved configuration; None where measurements move it, or its length is not known.

    Args:
        config: as in `config.yaml`.
        total_steps: of the run.
        steps_per_epoch: optimizer steps in a pass over the data.
    """
    optim, trainer = config["optim"], config["trainer"]
    if config["stage"] == "budget" or total_steps is None or steps_per_epoch is None:
        return None
    per_step = updates_per_step(config)
    fixed = optim["total_training_steps"]
    length = per_step * (fixed if fixed > 0 else max(steps_per_epoch * trainer["total_epochs"], total_steps))
    warmup = optim["lr_warmup_steps"]
    known = warmup is not None and warmup >= 0
    warmup = warmup * per_step if known else int(length * optim["lr_warmup_steps_ratio"])
    shape = optim["lr_scheduler"], warmup, length, optim["min_lr_ratio"] or 0.0, optim["num_cycles"], per_step
    return Schedule(optim["lr"], *shape)


def updates_per_step(config: Mapping[str, Any]) -> int:
    """Optimizer updates in a step of a resolved configuration."""
    if config["stage"] != "grpo":
        return 1
    actor, batch = config["actor"], config["data"]["train_batch_size"]
    return actor["ppo_epochs"] * (batch // (actor["ppo_mini_batch_size"] or batch))
