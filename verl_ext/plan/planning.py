"""From what was asked to plans: the configuration, the model, and a plan for each number of GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from verl_ext.plan.links import Cluster
from verl_ext.plan.models import find_model
from verl_ext.plan.options import Options
from verl_ext.plan.plan import Plan, advice, largest_that_fits, make_plan
from verl_ext.plan.shape import shape_of
from verl_ext.plan.workload import refuse_unknown
from verl_ext.trainer.stages import load_config


@dataclass(frozen=True)
class Planned:
    """A plan, and what would make it fit where it does not."""

    plan: Plan
    advice: str


def plans_for(options: Options, largest: bool) -> tuple[list[Planned], list[str]]:
    """A plan for each number of GPUs, and what has to be said about all of them.

    Args:
        options: what was asked.
        largest: take the largest micro-batch that fits, in place of the configured one.

    Raises:
        UserError: bad input.
    """
    config = refuse_unknown(load_config(options.command, options.overrides))
    model_config, notes = find_model(config)
    shape = shape_of(model_config)
    if config.model.use_liger:
        notes = [*notes, "model.use_liger is not counted, which saves activations; the plan is an upper bound"]
    planned = []
    for gpus in options.gpus:
        cluster = Cluster(options.hardware, gpus, options.gpus_per_node)
        plan = make_plan(config, shape, cluster, options.lengths)
        if largest:
            plan = largest_that_fits(plan, options.lengths)
        planned.append(Planned(plan, "" if plan.fits else advice(plan, options.lengths)))
    return planned, notes
