"""Refuses health settings that name no rule."""

from __future__ import annotations

import difflib

from verl_ext.errors import UserError
from verl_ext.health.own_rules import all_rules
from verl_ext.trainer.stages import RunConfig


def check_health(config: RunConfig) -> None:
    """`health.rules` can be loaded, and `health.stop_on` names rules of the stage.

    Raises:
        UserError: another value.
    """
    known = [rule.name for rule in all_rules(config.health.rules, "health.rules") if config.stage in rule.stages]
    for name in config.health.stop_on:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3) or known
            raise UserError(f"health.stop_on names '{name}', which is no rule of this stage; take {', '.join(near)}")
