"""Which values the keys of a recipe may have, beside what kind of value each takes (`kinds.py`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from verl_ext.errors import UserError

if TYPE_CHECKING:
    from eval_pipeline.recipe.schema import EvalRecipe

CHOICES = {
    "engine.kind": ("vllm", "openai"),
    "engine.dtype": ("auto", "float32", "float", "bfloat16", "float16", "half"),
    "judge.isolation": ("auto", "bwrap", "sandlock", "rlimits"),
    "selection.mode": ("max", "min"),
    "executor.kind": ("local", "ray"),
}


def is_positive_whole(value: Any) -> bool:
    """Whether a value is a whole number of at least 1; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def require_choices(recipe: EvalRecipe) -> None:
    """Refuse a word that is none of `CHOICES`, and a data set to choose by that the recipe does not have.

    Raises:
        UserError: the key, its value and what it may be.
    """
    values = {
        "engine.kind": recipe.engine.kind,
        "engine.dtype": recipe.engine.dtype,
        "judge.isolation": recipe.isolation,
        "selection.mode": recipe.selection.mode,
        "executor.kind": recipe.executor.kind,
    }
    for key, choices in CHOICES.items():
        if values[key] not in choices:
            raise UserError(f"{key} is {values[key]!r}; use one of {', '.join(choices)}")
    if recipe.selection.dataset is not None and recipe.selection.dataset not in recipe.datasets:
        raise UserError(
            f"selection.dataset is {recipe.selection.dataset!r}, which is not in `datasets`; name one that is"
        )


def require_choice_of_best(recipe: EvalRecipe) -> None:
    """Refuse tiers by which a `watch` could never choose a best checkpoint. A recipe without tiers is for `judge`.

    Raises:
        UserError: what has no results, and how to change that.
    """
    chosen_by = recipe.selection.dataset
    if chosen_by is None:
        if any(recipe.tiers.values()) and not recipe.tiers[1]:
            other = ", or set selection.dataset to one of tiers.tier2" if recipe.tiers[2] else ""
            raise UserError(f"tiers.tier1 is empty, so no best checkpoint could be chosen; add a data set to it{other}")
    elif chosen_by not in (*recipe.tiers[1], *recipe.tiers[2]):
        why = "tiers.tier3 is evaluated after the choice" if chosen_by in recipe.tiers[3] else "no tier names it"
        raise UserError(
            f"selection.dataset is {chosen_by!r}, but {why}, so no best checkpoint could be chosen; add it to "
            "tiers.tier1 or tiers.tier2, or set selection.dataset to a data set of these"
        )


def require_ranges(recipe: EvalRecipe) -> None:
    """Refuse numbers that cannot work.

    Raises:
        UserError: the key, its value and what it must be.
    """
    for key, count in _counts(recipe).items():
        if not is_positive_whole(count):
            raise UserError(f"{key} is {count!r}; it must be a whole number of at least 1")
    for key, value in {**_amounts(recipe), **_shares(recipe)}.items():
        if not 0 < value < math.inf:
            raise UserError(f"{key} is {value!r}; it must be above 0")
    for key, value in (("sampling.temperature", recipe.sampling.temperature), ("backoff_s", recipe.backoff_s)):
        if not 0 <= value < math.inf:
            raise UserError(f"{key} is {value!r}; it must not be below 0")
    for key, value in _shares(recipe).items():
        if value > 1:
            raise UserError(f"{key} is {value!r}; it must be at most 1")
    if recipe.sampling.num_samples > 1 and recipe.sampling.temperature == 0:
        raise UserError(
            "sampling.num_samples is above 1, but greedy answers are all equal; set sampling.temperature above 0"
        )


def _counts(recipe: EvalRecipe) -> dict[str, int]:
    """Whole numbers of at least 1."""
    return {
        "tier2_every": recipe.tier2_every,
        "batch_size": recipe.batch_size,
        "max_attempts": recipe.max_attempts,
        "qa_per_error_type": recipe.qa_per_error_type,
        "sampling.max_tokens": recipe.sampling.max_tokens,
        "sampling.num_samples": recipe.sampling.num_samples,
        "engine.max_model_len": recipe.engine.max_model_len,
        "engine.tensor_parallel_size": recipe.engine.tensor_parallel_size,
        "engine.concurrency": recipe.engine.concurrency,
        "judge.num_workers": 1 if recipe.judge_workers is None else recipe.judge_workers,
        "judge.limits.num_processes": recipe.limits.num_processes,
        "executor.num_workers": 1 if recipe.executor.num_workers is None else recipe.executor.num_workers,
    }


def _amounts(recipe: EvalRecipe) -> dict[str, float]:
    """Numbers above 0."""
    return {
        "judge.limits.cpu_s": recipe.limits.cpu_s,
        "judge.limits.wall_s": recipe.limits.wall_s,
        "judge.limits.memory_mb": recipe.limits.memory_mb,
        "judge.limits.file_mb": recipe.limits.file_mb,
        "judge.limits.output_mb": recipe.limits.output_mb,
        "poll_s": recipe.poll_s,
        "engine.timeout_s": recipe.engine.timeout_s,
    }


def _shares(recipe: EvalRecipe) -> dict[str, float]:
    """Numbers above 0 and up to 1."""
    return {
        "engine.gpu_memory_utilization": recipe.engine.gpu_memory_utilization,
        "sampling.top_p": recipe.sampling.top_p,
    }
