"""Loads an evaluation recipe: `recipes/eval/<name>.yaml` over the defaults, then `key=value` overrides."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from eval_pipeline.config import EvalConfig
from eval_pipeline.judge.packages import find_packages
from eval_pipeline.problems.dataset import parser_of
from eval_pipeline.report.metrics import wanted_k
from verl_ext.config.compose import Composer, load_yaml
from verl_ext.config.recipes import find_recipe
from verl_ext.config.schema import keys
from verl_ext.errors import UserError
from verl_ext.metrics.registry import EVALUATION


def load_recipe(name: str | None, overrides: Sequence[str] = ()) -> EvalConfig:
    """Read and check a recipe.

    Args:
        name: a name in `recipes/eval/`, a path to a YAML file, or None for the one that `recipes/default.yaml` names.
        overrides: `key=value`, as for a training.

    Raises:
        UserError: an unknown recipe or key, a value that cannot work, or a secret.
    """
    path = find_recipe("eval", name)
    composer = Composer(EvalConfig, extensible=False)
    composer.add_recipe(load_yaml(path), str(path))
    composer.add_overrides(overrides)
    recipe: EvalConfig = composer.build(str(path))
    for dataset, source in recipe.sources.items():
        parser_of(source.format, f"datasets.{dataset}.format")
    find_packages(recipe.judge.packages)
    require_metric(recipe.selection.metric, recipe.sampling.num_samples)
    return recipe


def known_keys() -> list[str]:
    """The keys that every recipe has."""
    return list(keys(EvalConfig))


def require_metric(metric: str, num_samples: int) -> None:
    """Refuse a `selection.metric` that no evaluation of the recipe has.

    Args:
        metric: its name.
        num_samples: answers to each problem.

    Raises:
        UserError: no such metric, with the closest one.
    """
    known = metric_names(num_samples)
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        few = "; pass_at_<k> needs sampling.num_samples of k or more" if metric.startswith("pass_at_") else ""
        choice = f"did you mean {near[0]!r}?" if near and not few else f"use one of {', '.join(known)}"
        raise UserError(f"selection.metric is {metric!r}, which no evaluation of this recipe has{few}; {choice}")


def metric_names(num_samples: int) -> list[str]:
    """The metrics of a data set with so many answers to each problem."""
    plain = [name.rpartition("/")[2] for name in EVALUATION]
    names = [name for name in plain if "<" not in name and name != "num_samples"]
    if num_samples == 1:
        return names
    return [*names, "num_samples", *(f"pass_at_{k}" for k in wanted_k(num_samples))]
