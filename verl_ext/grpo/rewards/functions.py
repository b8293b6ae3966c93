"""Built-in reward functions by their names in recipes, and the parser of `reward.functions`; without torch."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eval_pipeline.judge import ReferenceAnswer, ScoredAnswer, Tests, Verdict
from verl_ext.errors import UserError
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.plugins import Plugin

# The functions

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# no two parts match the same text, so no answer causes slow backtracking
_INSIDE = r"(?:(?!</?think>|</?answer>).)*"
_FORMAT = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*", re.DOTALL)


def opened_by(prompt: str) -> str:
    """The tag that the end of a rendered prompt opens, so that the answer lacks it: `<think>` or nothing."""
    return TAGS[0] if prompt.rstrip().endswith(TAGS[0]) else ""


def reward_format(answer: RewardedAnswer) -> float:
    """1 for `<think>...</think>` followed by `<answer>...</answer>` and nothing else; 0 otherwise."""
    return float(_FORMAT.fullmatch(answer.text) is not None)


def tag_count_reward(answer: RewardedAnswer) -> float:
    """0.25 for each of the four tags that occurs exactly once."""
    return sum(answer.text.count(tag) == 1 for tag in TAGS) / len(TAGS)


@dataclass(frozen=True)
class LengthPenalty:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13).

    Attributes:
        max_tokens: longest answer.
        buffer: number of tokens before `max_tokens` over which the penalty grows from 0 to -1.
    """

    max_tokens: int
    buffer: int

    def __call__(self, answer: RewardedAnswer) -> float:
        """Score an answer from -1 to 0; truncated answers get -1."""
        if answer.truncated:
            return -1.0
        over = answer.num_tokens - (self.max_tokens - self.buffer)
        return -min(max(over / self.buffer, 0.0), 1.0)


VERDICT_REWARDS: dict[str, Callable[[Verdict], float]] = {
    "reward_correct": lambda verdict: float(verdict.error_type == "success"),
    "code_tests": lambda verdict: verdict.pass_ratio,
    "exec_success": lambda verdict: float(verdict.error_type in ("success", "wrong_answer")),
}
"""Rewards from the judge's verdict: the answer is correct; fraction of tests passed; the program ran."""
PROGRAM_REWARDS = ("code_tests", "exec_success")
"""Rewards that run a program, and therefore apply only to rows whose ground truth has tests."""
TEXT_REWARDS: dict[str, Callable[[RewardedAnswer], float]] = {
    "reward_format": reward_format,
    "tag_count_reward": tag_count_reward,
}
LENGTH_PENALTY = "length_penalty"
BUILTIN_REWARDS = (*VERDICT_REWARDS, *TEXT_REWARDS, LENGTH_PENALTY)
RESERVED = (
    *BUILTIN_REWARDS, "reward_total", "adv", "seq_prompt_len", "seq_completion_len", "seq_total_len",
    "rollout_logprob_diff", "step", "attempt", "split", "sample_id", "number", "prompt", "answer", "advantage",
    "error_type", "message", "reward_failure",
)  # fmt: skip
"""Names of other metrics or columns; a user's function may not have them."""


def has_tests(tests: Tests) -> bool:
    """Whether a ground truth runs programs, so that `PROGRAM_REWARDS` apply."""
    return not isinstance(tests, ReferenceAnswer | ScoredAnswer)


# reward.functions


@dataclass(frozen=True)
class RewardSpec:
    """One entry of `reward.functions`.

    Attributes:
        name: name of its metric.
        weight: factor of its values.
        plugin: the user's function; None for one of `BUILTIN_REWARDS`.
    """

    name: str
    weight: float
    plugin: Plugin | None = None

    @property
    def needs_verdict(self) -> bool:
        """Whether the judge computes it from the row's `reward_model.ground_truth`."""
        return self.plugin is None and self.name in VERDICT_REWARDS


def parse_reward_functions(entries: Sequence[str]) -> list[RewardSpec]:
    """Parse `reward.functions`.

    An entry is `NAME`, `PATH_OR_MODULE:function` or `METRIC=PATH_OR_MODULE:function`, each with or without `*WEIGHT`.
    A function in `path.py` runs in separate processes; a function in `package.module` runs in this one.

    Raises:
        UserError: a function does not exist, a weight is invalid, or two metrics have one name.
    """
    specs = [_parse_entry(str(entry)) for entry in entries]
    names = [spec.name for spec in specs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UserError(
            f"reward.functions has {sorted(twice)[0]} twice; remove one, or rename it: OTHER=path.py:function"
        )
    return specs


def _parse_entry(entry: str) -> RewardSpec:
    name, _, weight_text = entry.rpartition("*") if "*" in entry.rpartition(":")[2] else (entry, "", "")
    name = name.strip()
    weight = _parse_weight(weight_text.strip() or "1", entry)
    if name in BUILTIN_REWARDS:
        return RewardSpec(name, weight)
    path_text, colon, function = name.rpartition(":")
    if not colon:
        near = difflib.get_close_matches(name, BUILTIN_REWARDS, n=1)
        if name.endswith(".py"):
            raise UserError(f"reward.functions names the file '{name}' without a function; write {name}:FUNCTION")
        fix = f"did you mean {near[0]}?" if near else f"use one of {', '.join(BUILTIN_REWARDS)}, or path.py:function"
        raise UserError(f"reward.functions names '{name}', which does not exist; {fix}")
    given, equals, rest = path_text.partition("=")
    if equals and "/" not in given:  # otherwise, the path contains the sign
        path_text = rest.strip()
    else:
        given = ""
    metric = given.strip() or function
    if metric in RESERVED or not re.fullmatch(r"\w+", metric):
        raise UserError(
            f"reward.functions names a function '{metric}', which is not a valid metric name or is reserved; write "
            "NAME=path.py:function"
        )
    return RewardSpec(metric, weight, Plugin.parse(f"{path_text}:{function}", "reward.functions"))


def _parse_weight(text: str, entry: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise UserError(f"reward.functions has '{entry}', whose weight is not a number; write it as NAME*0.5")
    return weight
