"""All metrics that the pipeline logs, and the one that a logged name stands for."""

from __future__ import annotations

import difflib
import re

from verl_ext.errors import UserError
from verl_ext.metrics.registry.evaluation import ADAPTIVE, ADAPTIVE_PREFIX, EVAL_PREFIX, EVALUATION, METHOD_FIGURES
from verl_ext.metrics.registry.metric import Metric
from verl_ext.metrics.registry.rewards import BUDGET, GRPO
from verl_ext.metrics.registry.training import START, SYSTEM, THROUGHPUT, TIME, TRAINING, VALIDATION

SECTIONS: dict[str, dict[str, Metric]] = {
    "Training": TRAINING,
    "Training by GRPO": GRPO,
    "The budget controller": BUDGET,
    "Validation": VALIDATION,
    "Throughput": THROUGHPUT,
    "Time": TIME,
    "The start, once for each, with its first step": START,
    "System": SYSTEM,
    "Checkpoint evaluation": EVALUATION,
    "The budget controller's evaluation": ADAPTIVE,
}

METRICS: dict[str, Metric] = {name: metric for section in SECTIONS.values() for name, metric in section.items()}


def describe(name: str) -> Metric:
    """Look a metric up.

    Args:
        name: a logged name, such as `train/loss` or `eval/humaneval/accepted_at_1`.

    Returns:
        Its entry; that of the pattern `eval/<dataset>/...` or `eval/adaptive/<method>_...` for an evaluation metric, of
        `<reward>_mean` for a reward.

    Raises:
        UserError: no metric has this name.
    """
    pattern = _pattern(name)
    if pattern not in METRICS:
        near = difflib.get_close_matches(pattern, METRICS, n=3)
        near_it = f"near it are {', '.join(near)}" if near else "docs/metrics.md lists them all"
        raise UserError(f"no metric is named '{name}'; {near_it}")
    return METRICS[pattern]


def _pattern(name: str) -> str:
    """The entry that a name may belong to."""
    parts = name.split("/")
    if name.startswith(ADAPTIVE_PREFIX):
        methods = "|".join(METHOD_FIGURES)
        return name if name in METRICS else re.sub(rf"/\w+?_({methods})$", r"/<method>_\1", name)
    if len(parts) == 3 and parts[0] == "eval":
        return EVAL_PREFIX + _figure_pattern(parts[2])
    if len(parts) == 2 and parts[0] in ("train", "eval") and name not in METRICS:
        return re.sub(r"/\w+_mean$", "/<reward>_mean", name)
    return name


def _figure_pattern(figure: str) -> str:
    """`pass_at_5` as `pass_at_<k>`, and a bound of an interval as `<rate>_low` or `<rate>_high`."""
    for bound in ("_low", "_high"):
        if figure.endswith(bound):
            return f"<rate>{bound}"
    return re.sub(r"^pass_at_\d+$", "pass_at_<k>", figure)
