"""An evaluation's settings, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from eval_pipeline.engines.answer import Sampling
from eval_pipeline.engines.settings import EngineSettings
from eval_pipeline.judge.limits import Limits
from eval_pipeline.judge.packages import find_packages
from eval_pipeline.problems.dataset import parser_of
from eval_pipeline.problems.source import DatasetSource
from eval_pipeline.recipe.kinds import require_kinds
from eval_pipeline.recipe.metric import require_metric
from eval_pipeline.recipe.values import is_positive_whole, require_choice_of_best, require_choices, require_ranges
from verl_ext.errors import UserError

TIERS = (1, 2, 3)


@dataclass(frozen=True)
class Selection:
    """How the best checkpoint is chosen."""

    metric: str
    mode: Literal["max", "min"]
    dataset: str | None


@dataclass(frozen=True)
class ExecutorSettings:
    """Who runs the engines."""

    kind: str
    num_workers: int | None
    address: str | None


@dataclass(frozen=True)
class EvalRecipe:
    """An evaluation's settings; `defaults.yaml` says what each means.

    Raises:
        UserError: a value that cannot work, by its key.
    """

    datasets: dict[str, DatasetSource]
    tiers: dict[int, tuple[str, ...]]
    tier2_every: int
    sampling: Sampling
    batch_size: int
    engine: EngineSettings
    isolation: str
    judge_workers: int | None
    judge_packages: tuple[str, ...]
    limits: Limits
    selection: Selection
    executor: ExecutorSettings
    max_attempts: int
    backoff_s: float
    poll_s: float
    qa_per_error_type: int
    wandb: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> EvalRecipe:
        """From the resolved configuration, as plain mappings."""
        require_kinds(config)
        judge = config["judge"]
        recipe = EvalRecipe(
            datasets={name: _source(name, entry) for name, entry in config["datasets"].items()},
            tiers={tier: tuple(config["tiers"][f"tier{tier}"]) for tier in TIERS},
            sampling=Sampling(**config["sampling"]),
            engine=EngineSettings(**config["engine"]),
            isolation=judge["isolation"],
            judge_workers=judge["num_workers"],
            judge_packages=tuple(judge["packages"]),
            limits=Limits(**judge["limits"]),
            selection=Selection(**config["selection"]),
            executor=ExecutorSettings(**config["executor"]),
            **{key: config[key] for key in _PLAIN},
        )
        require_choice_of_best(recipe)  # here alone: a command may restrict a recipe to data sets of any tier
        return recipe

    def __post_init__(self) -> None:
        for tier, names in self.tiers.items():
            unknown = [name for name in names if name not in self.datasets]
            if unknown:
                known = ", ".join(self.datasets) or "none"
                raise UserError(f"tiers.tier{tier} names {unknown[0]!r}, which is not in `datasets`; use {known}")
        require_choices(self)
        require_ranges(self)
        find_packages(self.judge_packages)
        require_metric(self.selection.metric, self.selection.mode, self.sampling.num_samples)

    def datasets_up_to(self, tier: int) -> list[tuple[str, int]]:
        """Data sets of a tier and of those before it, each with its own tier."""
        first: dict[str, int] = {}
        for number in TIERS[:tier]:
            for name in self.tiers[number]:
                first.setdefault(name, number)
        return list(first.items())


_PLAIN = ("tier2_every", "batch_size", "max_attempts", "backoff_s", "poll_s", "qa_per_error_type", "wandb")


def _source(name: str, entry: Any) -> DatasetSource:
    if not isinstance(entry, Mapping) or not {"format", "path"} <= entry.keys():
        raise UserError(f"datasets.{name} lacks a key; give at least `format` and `path`")
    unknown = entry.keys() - {"format", "path", "split", "subset", "limit"}
    if unknown:
        raise UserError(
            f"datasets.{name} has the unknown key {sorted(unknown)[0]!r}; use format, path, split, subset, limit"
        )
    if not isinstance(name, str) or not name.replace("_", "").replace("-", "").isalnum():
        raise UserError(
            f"datasets has the name {name!r}, which becomes part of file names; use letters, digits, - and _"
        )
    for key, value in entry.items():
        if key != "limit" and not isinstance(value, str) and (value is not None or key in ("format", "path")):
            raise UserError(f"datasets.{name}.{key} is {value!r}; it must be text")
    parser_of(entry["format"], f"datasets.{name}.format")
    limit = entry.get("limit")
    if limit is not None and not is_positive_whole(limit):
        raise UserError(f"datasets.{name}.limit is {limit!r}; it must be a whole number of at least 1, or null for all")
    return DatasetSource(name=name, **entry)
