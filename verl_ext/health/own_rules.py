"""Rules of the user's own beside those of this package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from verl_ext.errors import UserError, one_line
from verl_ext.health.config import HealthLimits
from verl_ext.health.facts import Facts
from verl_ext.health.findings import Seen, notice
from verl_ext.health.history import History
from verl_ext.health.rule import EVERY_STAGE, Rule
from verl_ext.health.rules import RULES
from verl_ext.plugins import Plugin


def all_rules(names: Iterable[str], key: str) -> tuple[Rule, ...]:
    """The rules of this package and the user's.

    Args:
        names: each `path.py:LIST` or `package.module:LIST`, a list that `rule(..., into=LIST)` has filled.
        key: the setting or option that they come from, for messages.

    Raises:
        UserError: one cannot be loaded, is no list of rules, or has the name of another rule.
    """
    rules = [*RULES, *(guarded(each) for text in names for each in rules_of(Plugin.parse(text, key)))]
    used = [each.name for each in rules]
    if twice := sorted({name for name in used if used.count(name) > 1}):
        raise UserError(f"{key}: there are two rules {twice[0]}; rename the function of yours")
    return tuple(rules)


def rules_of(plugin: Plugin) -> list[Rule]:
    """Those of one list."""
    found = plugin.load()
    if not isinstance(found, list | tuple) or not found or not all(isinstance(each, Rule) for each in found):
        raise UserError(f"{plugin.key}: {plugin} is not a list of rules; fill it with @rule(..., into={plugin.name})")
    for each in found:
        if not each.watches or not each.stages or not each.stages <= EVERY_STAGE:
            raise UserError(
                f"{plugin.key}: the rule {each.name} must watch a metric, in stages that are among "
                f"{', '.join(sorted(EVERY_STAGE))}"
            )
    return list(found)


def guarded(rule: Rule) -> Rule:
    """The rule, whose failure is a notice and keeps no other rule from being checked."""

    def check(history: History, facts: Facts, limits: HealthLimits) -> Seen | None:
        try:
            return rule.check(history, facts, limits)
        except Exception as error:  # whatever the user's code raises
            return notice(f"the rule itself failed ({one_line(error)})")

    return replace(rule, check=check)
