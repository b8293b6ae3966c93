"""The context of a run that rules can read besides metrics: stage, length, limits, and learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from verl_ext.checkpoint.manifest import committed_steps
from verl_ext.config.run_config import changed_files, changes_validation, num_updates, read_config_file
from verl_ext.errors import UserError

LANGUAGE = frozenset({"sft", "vlm_sft"})
"""Stages whose loss is a cross-entropy."""
REWARDED = frozenset({"grpo", "budget"})
"""Stages that learn from rewards."""
STAGES = LANGUAGE | REWARDED
STABLE_SHARE = 0.9
"""Fraction of the steps after the warm-up for which a wsd schedule is constant."""
_READ_KEYS = {"save_freq", "device", "logger"}
"""Keys of the section `trainer` that the checklists read."""


@dataclass(frozen=True)
class LRSchedule:
    """The learning rate of a recipe at each step.

    Implements the schedules of verl 0.7.0 (`verl.utils.torch_functional`) independently of the trainer: linear warm-up
    from 0, then constant, cosine, or wsd (warm-up, stable, decay).

    Attributes:
        peak: learning rate after the warm-up.
        kind: constant, cosine or wsd.
        warmup: number of warm-up updates.
        length: number of updates of the whole schedule.
        min_ratio: minimum learning rate relative to the peak.
        num_cycles: number of cosine cycles; half a cycle ends at the minimum.
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
        """Return the learning rate of a step.

        Args:
            step: counted from 1.
            num_skipped: earlier steps without an update, at which the schedule does not advance.
        """
        return self.peak * self._share((step - 1 - num_skipped) * self.updates_per_step)

    def _share(self, update: int) -> float:
        if update < self.warmup:
            return update / max(1, self.warmup)
        if self.kind == "constant":
            return 1.0
        remaining = self.length - self.warmup
        stable = int(remaining * STABLE_SHARE) if self.kind == "wsd" else 0
        after = update - self.warmup - stable
        if after < 0:
            return 1.0
        if self.kind == "wsd" and update >= self.length:
            return self.min_ratio
        cosine = math.cos(2 * math.pi * self.num_cycles * after / max(1, remaining - stable))
        return self.min_ratio + (1 - self.min_ratio) * max(0.0, (1 + cosine) / 2)


def schedule_of(
    config: Mapping[str, Any],
    total_steps: int | None,
    steps_per_epoch: int | None,
    attempts: Sequence[Mapping[str, Any]] = (),
) -> LRSchedule | None:
    """Return the schedule of a resolved configuration; None if measurements change it, or if its length is unknown.

    The length is unknown if one of the attempts has changed `data.train_batch_size`, and with it the steps per epoch,
    or if the run started from the checkpoint of another run, which may have had another batch size.
    """
    optim, trainer = config["optim"], config["trainer"]
    has_equal_epochs = not any("data.train_batch_size" in (each.get("config_changes") or ()) for each in attempts)
    has_equal_epochs &= not any(each.get("first_step") for each in attempts[:1])
    if config["stage"] == "budget" or total_steps is None or steps_per_epoch is None or not has_equal_epochs:
        return None
    batch, actor = config["data"]["train_batch_size"], config.get("actor")
    per_step = num_updates(batch, actor["ppo_mini_batch_size"], actor["ppo_epochs"]) if actor else 1
    fixed = optim["total_training_steps"]
    length = per_step * (fixed if fixed > 0 else max(steps_per_epoch * trainer["total_epochs"], total_steps))
    steps = optim["lr_warmup_steps"]
    has_steps = steps is not None and steps >= 0
    return LRSchedule(
        peak=optim["lr"],
        kind=optim["lr_scheduler"],
        warmup=steps * per_step if has_steps else int(length * optim["lr_warmup_steps_ratio"]),
        length=length,
        min_ratio=optim["min_lr_ratio"] or 0.0,
        num_cycles=optim["num_cycles"],
        updates_per_step=per_step,
    )


@dataclass(frozen=True)
class RunContext:
    """Properties of a run besides its metrics.

    Attributes:
        stage: sft, vlm_sft, grpo or budget.
        total_steps: steps of the whole run; None if unknown.
        schedule: learning rate by step; None if the recipe does not determine it.
        max_prompt_length: in tokens; None without a limit.
        max_response_length: in tokens; None without a limit.
        samples_per_step: completions per step over all ranks; None if unknown.
        checkpoints: returns the steps of the complete checkpoints.
        untrained_loss: nat/token of random guessing, for a run that started from untrained weights; None for one that
            started from pretrained weights.
        configured_at: step from which the run has had its present configuration.
        comparable_from: first step whose validation measures the same as the latest.
    """

    stage: str
    total_steps: int | None = None
    schedule: LRSchedule | None = None
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    samples_per_step: int | None = None
    checkpoints: Callable[[], Sequence[int]] = tuple
    untrained_loss: float | None = None
    configured_at: int = 0
    comparable_from: int = 0

    @classmethod
    def of(
        cls,
        run_dir: Path,
        run: Mapping[str, Any],
        config: Mapping[str, Any],
        total_steps: int | None,
        steps_per_epoch: int | None,
    ) -> RunContext:
        """Create the context of a run directory from its `run.json` and `config.yaml`."""
        data, is_grpo = config["data"], config["stage"] == "grpo"
        return cls(
            stage=config["stage"],
            total_steps=total_steps,
            schedule=schedule_of(config, total_steps, steps_per_epoch, run["attempts"]),
            max_prompt_length=data["max_prompt_length"] if is_grpo else None,
            max_response_length=data["max_response_length"] if is_grpo else None,
            samples_per_step=data["train_batch_size"] * config["rollout"]["n"] if is_grpo else None,
            checkpoints=partial(committed_steps, run_dir),
            untrained_loss=run["untrained_loss"],
            configured_at=configured_at(run["attempts"]),
            comparable_from=comparable_from(run["attempts"], data),
        )


def configured_at(attempts: Sequence[Mapping[str, Any]]) -> int:
    """Return the step from which the last attempt that changed the configuration started; 0 if none did."""
    changed = [each.get("first_step") or 0 for each in attempts if each.get("config_changes")]
    return changed[-1] if changed else 0


def comparable_from(attempts: Sequence[Mapping[str, Any]], data: Mapping[str, Any]) -> int:
    """Return the first step after the last change of what a validation measures; 0 if it never changed.

    Args:
        data: the run's section `data`.
    """
    first, files = 0, dict[str, str]()
    for each in attempts:
        resumed_at, now = each.get("first_step"), each.get("input_files") or {}
        if resumed_at is None:  # it ended before training
            continue
        own_first = resumed_at + 1 if resumed_at else 0
        is_changed = changes_validation(each.get("config_changes") or (), data) or changed_files(files, now)
        first, files = own_first if is_changed else min(first, own_first), {**files, **now}
    return first


def read_run_config(path: Path) -> dict[str, Any]:
    """Read the `config.yaml` of a run.

    Raises:
        UserError: the file is not the configuration of a run.
    """
    config = read_config_file(path)
    is_of_a_run = all(isinstance(config.get(name), dict) for name in ("trainer", "optim", "data"))
    if not is_of_a_run or not isinstance(config.get("stage"), str) or not _READ_KEYS <= config["trainer"].keys():
        raise UserError(f"{path} is not the configuration of a run; the trainer writes it when a run starts")
    return config
