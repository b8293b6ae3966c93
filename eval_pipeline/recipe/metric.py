"""Which figures the best checkpoint can be chosen by."""

from __future__ import annotations

import difflib

from eval_pipeline.figures.pass_at_k import WANTED_K
from verl_ext.errors import UserError
from verl_ext.metrics.registry.evaluation import EVALUATION

_COST = "cost_per_solved_"


def require_metric(metric: str, mode: str, num_samples: int) -> None:
    """Refuse a `selection.metric` that no evaluation of the recipe has, and a mode by which the dearest would win.

    Args:
        metric: name of a figure.
        mode: max or min.
        num_samples: answers to each problem.

    Raises:
        UserError: no such figure, with those that are near it.
    """
    known = figure_names(num_samples)
    if metric not in known:
        near = difflib.get_close_matches(metric, known, n=1)
        few = "; pass_at_<k> needs sampling.num_samples of k or more" if metric.startswith("pass_at_") else ""
        choice = f"did you mean {near[0]!r}?" if near and not few else f"use one of {', '.join(known)}"
        raise UserError(f"selection.metric is {metric!r}, which no evaluation of this recipe has{few}; {choice}")
    if metric.startswith(_COST) and mode == "max":
        raise UserError(f"selection.metric={metric} is a cost, so lower is better; set selection.mode=min")


def figure_names(num_samples: int) -> list[str]:
    """The figures of a data set with so many answers to each problem."""
    plain = [name.rpartition("/")[2] for name in EVALUATION]
    names = [name for name in plain if "<" not in name and name != "num_samples"]
    if num_samples == 1:
        return names
    return [*names, "num_samples", *(f"pass_at_{k}" for k in sorted({*WANTED_K, num_samples}) if k <= num_samples)]
