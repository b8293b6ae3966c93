"""A reward function of the user's own that runs in the rank itself, as those of this package do."""

from __future__ import annotations

import math

from verl_ext.errors import UserError
from verl_ext.grpo.rewards.answer import RewardedAnswer
from verl_ext.grpo.rewards.custom import RewardError
from verl_ext.own_code import OwnCode


class InProcess:
    """Calls `function(answer: RewardedAnswer) -> float`; nothing can end a call, so it must be quick.

    Args:
        own: where the function is.

    Raises:
        UserError: it cannot be loaded, or is no function.
    """

    def __init__(self, own: OwnCode) -> None:
        self._function = own.load()
        if not callable(self._function):
            raise UserError(
                f"{own.key} names {own.place}:{own.name}, which is no function; give one of a RewardedAnswer"
            )

    def __call__(self, answer: RewardedAnswer) -> float:
        """The score of one answer.

        Raises:
            RewardError: the function raised, or gave no finite number.
        """
        try:
            score = float(self._function(answer))
        except Exception as error:  # whatever the user's function raises, it costs this sample its part
            raise RewardError(f"{type(error).__name__}: {error}"[:500]) from error
        if not math.isfinite(score):
            raise RewardError(f"it returned {score}")
        return score
