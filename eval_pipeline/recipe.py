"""Loads evaluation recipes, and computes the digests that identify reusable answers, verdicts and results."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from eval_pipeline.checkpoints import read_training_run
from eval_pipeline.config import TIERS, EvalConfig, TiersConfig
from eval_pipeline.judge.isolation import find_packages
from eval_pipeline.problems.datasets import parser_of
from eval_pipeline.report.metrics import CODE_METRIC, wanted_k
from verl_ext.config.compose import Composer
from verl_ext.config.recipes import find_recipe
from verl_ext.errors import UserError
from verl_ext.metrics.registry import EVALUATION

_NOT_DECISIVE = ("gpu_memory_utilization", "base_url", "concurrency", "timeout_s", "load_timeout_s", "api_key_env")
"""Engine settings that change the speed or the origin of an answer, but not the answer."""


def load_eval_config(name: str | None, overrides: Sequence[str] = ()) -> EvalConfig:
    """Load and check a recipe: `recipes/eval/<name>.yaml` over the defaults, then `key=value` overrides.

    Args:
        name: name of a recipe, or path of a YAML file; None uses the recipe that `recipes/default.yaml` names.

    Raises:
        UserError: an unknown recipe or key, an invalid value, or a secret.
    """
    path = find_recipe("eval", name)
    composer = Composer(EvalConfig, extensible=False)
    composer.add_recipe_file(path)
    composer.add_overrides(overrides)
    config: EvalConfig = composer.build()
    for dataset, source in config.sources.items():
        parser_of(source.format, f"datasets.{dataset}.format")
    find_packages(config.judge.packages)
    if config.selection.metric is not None:
        _require_metric(config.selection.metric, config.sampling.num_samples)
    return config


def config_for_run(recipe: str | None, overrides: Sequence[str], run_dir: Path | None) -> EvalConfig:
    """Load the given recipe, or else the training run's, or else the default.

    The arguments of the chat template are those of training, extended by the recipe's.

    Args:
        recipe: name of a recipe; None uses `eval.recipe` of the run.
        run_dir: directory of the training run; None for a model without a run.

    Raises:
        UserError: see `load_eval_config`; or the run names a recipe file. A recipe decides where keys are sent and
            which code runs, and a run's directory, including such a file, may come from someone else.
    """
    run = read_training_run(run_dir)
    if not recipe:
        recipe = run.recipe
        if recipe is not None and (recipe.endswith((".yaml", ".yml")) or not re.fullmatch(r"[\w.-]+", recipe)):
            raise UserError(
                f"the run's config.yaml names the recipe file {recipe}; if you trust it, add --recipe {recipe}"
            )
    config = load_eval_config(recipe, overrides)
    kwargs = {**run.chat_template_kwargs, **config.engine.chat_template_kwargs}
    engine = replace(config.engine, chat_template_kwargs=kwargs)
    engine.check()
    return replace(config, engine=engine)


def restrict_datasets(config: EvalConfig, datasets: Collection[str]) -> EvalConfig:
    """Remove all other datasets from the tiers.

    Args:
        datasets: names; the configuration may lack some.

    Raises:
        UserError: no dataset is left.
    """
    tier1, tier2, tier3 = ([name for name in config.tiers.of(tier) if name in datasets] for tier in TIERS)
    tiers = TiersConfig(tier1=tier1, tier2=tier2, tier3=tier3)
    if not tiers.names:
        raise UserError(
            f"no tier of the recipe lists any of the evaluated datasets ({', '.join(sorted(datasets))}); specify the "
            "recipe of that evaluation with --recipe"
        )
    return replace(config, tiers=tiers)


def metric_names(num_samples: int) -> list[str]:
    """The metrics of a dataset with this many answers per problem."""
    plain = [name.rpartition("/")[2] for name in EVALUATION]
    names = [name for name in plain if "<" not in name and name != "num_samples"]
    if num_samples == 1:
        return names
    return [*names, "num_samples", *(f"pass_at_{k}" for k in wanted_k(num_samples))]


def _require_metric(metric: str, num_samples: int) -> None:
    """Refuse a `selection.metric` that no evaluation of the recipe reports."""
    known = metric_names(num_samples)
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        few = "; pass_at_<k> needs sampling.num_samples of k or more" if metric.startswith("pass_at_") else ""
        choice = f"did you mean {near[0]!r}?" if near and not few else f"use one of {', '.join(known)}"
        raise UserError(f"selection.metric is {metric!r}, which no evaluation of this recipe reports{few}; {choice}")


def selection_metric(config: EvalConfig, runs_code: bool) -> str:
    """The metric that selects the best checkpoint: `selection.metric`, or by default the one that suits the problems.

    Args:
        runs_code: whether any problem of `config.selected_on` runs code.

    Raises:
        UserError: `selection.metric` is `exec_success_rate`, but no problem runs code, so that it would always be 1.
    """
    metric = config.selection.metric
    if metric == CODE_METRIC and not runs_code:
        raise UserError(
            f"selection.metric is {CODE_METRIC}, which is 1 for every answer, because answers to "
            f"{', '.join(config.selected_on)} are not run; set selection.metric=null or another metric"
        )
    return metric or (CODE_METRIC if runs_code else "accepted_at_1")


@dataclass(frozen=True)
class EvalDigests:
    """Digests of one checkpoint on one dataset. Stored work is reused only with the same digest."""

    model: str
    """Digest of the weights."""
    answers: str
    """Digest of everything that affects the answers."""
    verdicts: str
    """Digest of everything that affects the verdicts, including the answers."""

    @staticmethod
    def of(identity: Any, problems: str, config: EvalConfig, packages: Mapping[str, str]) -> EvalDigests:
        """Compute the digests. The JSON behind them must not change, or every finished evaluation would run again.

        Args:
            identity: identity of the weights, from `EvalCheckpoint.identity`.
            problems: digest of the dataset's problems.
            packages: versions of the packages that programs may import.
        """
        engine = {key: value for key, value in asdict(config.engine).items() if key not in _NOT_DECISIVE}
        if not engine["chat_template_kwargs"]:
            del engine["chat_template_kwargs"]
        model = _digest(identity)
        answers = _digest(
            {
                "model": model,
                "problems": problems,
                "sampling": asdict(config.sampling),
                "batch_size": config.batch_size,
                "engine": engine,
            }
        )
        judge = {"answers": answers, "isolation": config.judge.isolation, "limits": asdict(config.judge.limits)}
        return EvalDigests(model, answers, _digest({**judge, "packages": packages}))


def _digest(content: Any) -> str:
    return xxhash.xxh3_128(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
