"""Refuses health settings that name no rule."""

from __future__ import annotations

import difflib

from omegaconf import DictConfig

from verl_ext.config.checks import require_positive
from verl_ext.errors import UserError
from verl_ext.health.own_rules import all_rules
from verl_ext.health.series import MOST_RECENT


def check_health(config: DictConfig) -> None:
    """`health.every` counts steps, `health.rules` can be loaded, and `health.stop_on` names rules of the stage.

    Raises:
        UserError: another value.
    """
    require_positive("health.every", config.health.every)
    window = config.health.limits.window
    if not 3 <= window <= MOST_RECENT:
        raise UserError(f"health.limits.window is {window}; it must be from 3 to {MOST_RECENT} steps")
    for name, value in config.health.limits.items():
        if value is None or value <= 0:
            raise UserError(f"health.limits.{name} is {value}; it must be above 0")
    known = [rule.name for rule in all_rules(config.health.rules, "health.rules") if config.stage in rule.stages]
    for name in config.health.stop_on:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3) or known
            raise UserError(f"health.stop_on names '{name}', which is no rule of this stage; take {', '.join(near)}")
    if config.health.stop_on and not config.health.enabled:
        raise UserError("health.stop_on has no effect with health.enabled=false; set it to true")
