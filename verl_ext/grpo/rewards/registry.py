"""Reward functions by the names that recipes give them."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from verl_ext.errors import UserError
from verl_ext.grpo.rewards.judged import OF_VERDICTS
from verl_ext.grpo.rewards.text import reward_format, tag_count_reward
from verl_ext.plugins import Plugin

OF_TEXTS = {"reward_format": reward_format, "tag_count_reward": tag_count_reward}
LENGTH_PENALTY = "length_penalty"
NAMES = (*OF_VERDICTS, *OF_TEXTS, LENGTH_PENALTY)
RESERVED = (
    *NAMES, "reward_total", "adv", "seq_prompt_len", "seq_completion_len", "seq_total_len", "rollout_logprob_diff",
    "step", "attempt", "sample_id", "number", "prompt", "answer", "advantage",
)  # fmt: skip
"""Metrics or columns of other meaning, which a function of the user's own may not take the name of."""


@dataclass(frozen=True)
class WantedReward:
    """One entry of `reward.functions`.

    Attributes:
        name: of its metric.
        weight: its values are multiplied by this.
        plugin: the function of the user's; None for one of `NAMES`.
    """

    name: str
    weight: float
    plugin: Plugin | None = None

    @property
    def by_verdict(self) -> bool:
        """Whether the judge decides on it, by the row's `reward_model.ground_truth`."""
        return self.plugin is None and self.name in OF_VERDICTS


def wanted_rewards(entries: Sequence[str]) -> list[WantedReward]:
    """Read `reward.functions`: each `NAME`, `PLACE:function` or `METRIC=PLACE:function`, with or without `*WEIGHT`.

    A place is `path.py`, whose function runs in processes of its own, or `package.module`, whose function runs here.

    Raises:
        UserError: no entry, one that does not exist or has no weight, or two of one name.
    """
    wanted = [_wanted(str(entry)) for entry in entries]
    if not wanted:
        raise UserError(f"reward.functions is empty; take some of {', '.join(NAMES)}, or path.py:function")
    names = [reward.name for reward in wanted]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"reward.functions has {sorted(twice)[0]} twice; give it once, or name one OTHER=path.py:function"
        )
    return wanted


def _wanted(entry: str) -> WantedReward:
    name, _, weight_text = entry.partition("*")
    name = name.strip()
    weight = _weight(weight_text.strip() or "1", entry)
    if name in NAMES:
        return WantedReward(name, weight)
    path_text, colon, function = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, NAMES, n=1)
        if name.endswith(".py"):
            raise UserError(f"reward.functions names the file '{name}' without a function; write {name}:FUNCTION")
        hint = f"did you mean {near[0]}?" if near else f"take one of {', '.join(NAMES)}, or path.py:function"
        raise UserError(f"reward.functions names '{name}', which does not exist; {hint}")
    given, _, path_text = path_text.rpartition("=")
    metric = given.strip() or function
    if metric in RESERVED or not re.fullmatch(r"\w+", metric):
        raise UserError(
            f"reward.functions calls a function of your own '{metric}', which is no name for its metric or is taken; "
            "write NAME=path.py:function"
        )
    return WantedReward(metric, weight, Plugin.parse(f"{path_text}:{function}", "reward.functions"))


def _weight(text: str, entry: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"reward.functions has '{entry}', whose weight is no number; write it as NAME*0.5")
    return weight
