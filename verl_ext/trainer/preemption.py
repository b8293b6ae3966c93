"""When a run has to stop, as all ranks agree."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from verl_ext.errors import SICK_EXIT_CODE, Stop
from verl_ext.trainer.stop_signals import RankSignals

SLACK = 1.25
"""Factor on the longest step and save so far when they are expected once more."""
SLACK_S = 5.0
"""What closing the trackers and leaving takes."""


class Preemption:
    """Has all ranks learn at the same place what one of them was asked.

    Args:
        signals: what this rank is asked; None in a process whose signals are someone else's.
        deadline: when this machine goes away, in seconds since 1970; None when that is not known.
        rules: health rules that stop the run; the same on every rank.

    Attributes:
        expected_save_s: how long a save is taken to last before there was one.
        sick_by: the one of `rules` that has found something; on rank 0 alone.
    """

    def __init__(self, signals: RankSignals | None, deadline: float | None, rules: Sequence[str] = ()) -> None:
        self.signals, self.deadline = signals, deadline
        self._rules = list(rules)
        self.sick_by: str | None = None
        self.longest_step_s = self.longest_save_s = self.expected_save_s = 0.0

    def hold(self) -> None:
        """From now on a signal is noted and no longer ends this rank; collective."""
        dist.barrier()  # all ranks together: one that left at once would take along those that hold already
        if self.signals is not None:
            self.signals.hold()

    def note(self, *, step_s: float = 0.0, save_s: float = 0.0) -> None:
        """Learn how long steps and saves last."""
        self.longest_step_s = max(self.longest_step_s, step_s)
        self.longest_save_s = max(self.longest_save_s, save_s)

    def check(self, is_writing: bool = False) -> bool:
        """Stop if any rank has to; collective.

        Args:
            is_writing: whether this rank is still writing a checkpoint in the background.

        Returns:
            Whether any rank still is.

        Raises:
            Stop: on every rank.
        """
        asked = int(self.signals.received or 0) if self.signals is not None else 0
        sick = 0 if self.sick_by is None else 1 + self._rules.index(self.sick_by)
        votes = torch.tensor([asked, self.deadline_is_near(is_writing), sick, is_writing], dtype=torch.int64)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        number, near, sick, writing = votes.tolist()
        if number:
            raise Stop(signal.Signals(number).name)
        if near:
            raise Stop("the deadline")
        if sick:
            raise Stop(f"the health rule {self._rules[sick - 1]}", SICK_EXIT_CODE)
        return bool(writing)

    def deadline_is_near(self, is_writing: bool) -> bool:
        """Whether another step and a save, after the one under way, might end too late; never before the first step."""
        if self.deadline is None or not self.longest_step_s:
            return False
        save_s = self.longest_save_s or self.expected_save_s
        needed = SLACK * (self.longest_step_s + (2 if is_writing else 1) * save_s) + SLACK_S
        return time.time() + needed >= self.deadline
