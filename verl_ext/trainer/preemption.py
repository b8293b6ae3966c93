"""Stops all ranks at the same step: on a signal to any of them, before a deadline, or because of a health rule."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from verl_ext.console import warn
from verl_ext.errors import STOP_SIGNALS, UNHEALTHY_EXIT_CODE, Stop
from verl_ext.processes import StopSignals
from verl_ext.trainer.config import PreemptionConfig, parse_deadline, to_seconds

SLACK = 1.25
"""Safety factor for the expected duration of the next step and save."""
SLACK_S = 5.0
"""Seconds for closing the trackers and exiting."""
POLL_S = 0.005
"""Seconds between two looks at signals during a wait."""
STORE_POLL_S = 0.5
"""Seconds between two looks at the process group's store, which a rank with a signal writes."""
_numbers = count()
"""Numbers of the votes of this process, which are the same on every rank."""
DEADLINE_VARIABLES = (
    "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
    "SAGEMAKER_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP",
)
"""Variables that verl's `should_save_ckpt_esi` reads: Volcano Engine's machine learning platform and SageMaker."""


def ignore_stop_signals(worker: int) -> None:
    """Ignore stop signals in a data loader worker, which must live until its rank has saved; it ends with the rank."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class StopVote:
    """Lets all ranks agree on stopping.

    Args:
        signals: signals of this rank; None if the process handles its signals itself. A rank always saves at the next
            step boundary, even after several signals; only the launcher stops it sooner.
        deadline: time of preemption, in seconds since 1970; None if unknown.
        rules: health rules that stop the run; the same on every rank.
        grace_s: seconds between a signal and the end of the ranks.

    Attributes:
        can_abandon_step: whether a signal stops the run in the middle of the current step, because the longest step and
            a save would take longer than `grace_s`; the same on every rank.
        is_validating: whether the run validates, which a signal always interrupts.
        expected_save_s: expected duration of a save until one is measured.
        failed_rule: rule that has found a problem, from `rules`; set on rank 0 only.
        longest_step_s: longest step so far, in seconds.
        longest_rest_s: longest time from the last wait of a step to its end, in seconds.
        longest_save_s: longest save so far, in seconds.
    """

    def __init__(
        self,
        signals: StopSignals | None,
        deadline: float | None,
        rules: Sequence[str] = (),
        grace_s: float = math.inf,
    ) -> None:
        self.signals, self.deadline, self.grace_s = signals, deadline, grace_s
        self.can_abandon_step = self.is_validating = False
        self._is_late, self._num_saves = False, 1  # saves that a stop must wait for
        self._learned_at, self._polled_at = math.inf, -math.inf  # of a signal to any rank; when it last asked the store
        self._waited_at = math.inf
        self._store_key = f"verl_ext/stop/{next(_numbers)}"
        self._rules = list(rules)
        self.failed_rule: str | None = None
        self.longest_step_s = self.longest_rest_s = self.longest_save_s = self.expected_save_s = 0.0

    def arm(self) -> None:
        """Record signals from now on instead of ending this rank; collective."""
        dist.barrier()  # all ranks together, because a rank that ends now would crash ranks that are already armed
        if self.signals is not None:
            self.signals.install()

    def note(self, *, step_s: float = 0.0, save_s: float = 0.0) -> None:
        """Record how long a step or a save took."""
        self.longest_step_s = max(self.longest_step_s, step_s)
        if step_s:
            self.longest_rest_s = max(self.longest_rest_s, time.monotonic() - self._waited_at)
        self.longest_save_s = max(self.longest_save_s, save_s)

    def needed_s(self, num_saves: int = 1) -> float:
        """Seconds that the longest step so far and saves take; until a step has ended, only the expected saves."""
        return self.longest_step_s + num_saves * self.save_s

    @property
    def save_s(self) -> float:
        """Seconds of the longest save so far; before the first one, its expected duration."""
        return self.longest_save_s or self.expected_save_s

    @property
    def _signal(self) -> int:
        """The first stop signal of this rank; 0 without one."""
        return int(self.signals.received[0]) if self.signals is not None and self.signals.received else 0

    def raise_if_stopping(self, is_writing: bool = False) -> bool:
        """Stop all ranks if any rank must stop; collective.

        Args:
            is_writing: whether this rank is still writing a checkpoint in the background.

        Returns:
            Whether any rank is still writing.

        Raises:
            Stop: on every rank.
        """
        rule = 0 if self.failed_rule is None else 1 + self._rules.index(self.failed_rule)
        is_short = bool(self.longest_step_s) and self.needed_s(2 if is_writing else 1) > self.grace_s
        votes = (self._signal, self.deadline_is_near(is_writing), rule, is_writing, is_short)
        number, near, rule, writing, any_is_short = _maxima(*votes)
        self.can_abandon_step, self._num_saves = bool(any_is_short), 2 if writing else 1
        if number:
            raise Stop(signal.Signals(number).name, is_urgent=True)
        if near:
            raise Stop("the deadline")
        if rule:
            raise Stop(f"the health rule {self._rules[rule - 1]}", UNHEALTHY_EXIT_CODE)
        return bool(writing)

    # Between step boundaries

    @contextmanager
    def validation(self) -> Iterator[None]:
        """Return a context in which every signal interrupts the work in progress."""
        self.is_validating = True
        try:
            yield
        finally:
            self.is_validating = False

    @property
    def can_interrupt(self) -> bool:
        """Whether a signal interrupts the work in progress; the same on every rank."""
        return self.can_abandon_step or self.is_validating

    def raise_if_interrupted(self) -> None:
        """Stop all ranks between step boundaries if any rank has a signal and `can_interrupt` is true; collective.

        Raises:
            Stop: on every rank.
        """
        if self.can_interrupt and (number := _maxima(self._signal)[0]):
            raise Stop(signal.Signals(number).name, is_urgent=True)

    def wait_unless_interrupted(self, is_waiting: Callable[[], object]) -> None:
        """Wait while `is_waiting` is true on any rank, before the first update of a step; collective.

        Raises:
            Stop: on every rank, if any rank has a signal, and `can_interrupt` is true or little time is left.
        """
        while True:
            votes = torch.tensor([self._signal, self.is_interrupted(), bool(is_waiting())], dtype=torch.int64)
            work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, async_op=True)
            while not work.is_completed():  # a signal could not be handled inside a blocking call
                self._look_for_signal()
                time.sleep(POLL_S)
            work.wait()
            number, is_interrupted, is_any_waiting = votes.tolist()
            if number and (self.can_interrupt or is_interrupted):
                raise Stop(signal.Signals(number).name, is_urgent=True)
            if not is_interrupted and not is_any_waiting:  # an interrupted rank's next vote follows that of the signal
                self._waited_at = time.monotonic()
                return
            time.sleep(POLL_S)

    def is_interrupted(self, group: dist.ProcessGroup | None = None) -> bool:
        """Whether this rank must end its work early and call `wait_unless_interrupted`, which then raises.

        True after a signal to any rank, if `can_interrupt` is true or the rest of the step and a save might not fit
        into the time left. Other ranks may learn of the signal up to `STORE_POLL_S` later.

        Args:
            group: ranks that must get the same answer; collective over them.
        """
        knows_signal = self._look_for_signal()
        left_s = self._learned_at + self.grace_s - time.monotonic()
        needed_s = self.longest_rest_s + SLACK * self._num_saves * self.save_s + SLACK_S
        self._is_late |= knows_signal and left_s < needed_s
        is_interrupted = knows_signal and (self.can_interrupt or self._is_late)
        return is_interrupted if group is None else bool(_maxima(is_interrupted, group=group)[0])

    def _look_for_signal(self) -> bool:
        """Whether this rank knows of a signal to any rank."""
        if self._signal and self._learned_at == math.inf:
            assert self.signals is not None
            self._learned_at = min(self.signals.asked_at, time.monotonic())
            _get_default_store().set(self._store_key, "")
        elif self._learned_at == math.inf and time.monotonic() - self._polled_at > STORE_POLL_S:
            self._polled_at = time.monotonic()
            if _get_default_store().check([self._store_key]):
                self._learned_at = self._polled_at
        return self._learned_at < math.inf

    def deadline_is_near(self, is_writing: bool) -> bool:
        """Whether another step and a save might end too late; never before the first step.

        Args:
            is_writing: whether a save in progress must end first.
        """
        if self.deadline is None or not self.longest_step_s:
            return False
        needed_s = SLACK * self.needed_s(2 if is_writing else 1) + SLACK_S
        return time.time() + needed_s >= self.deadline


def _maxima(*values: int, group: dist.ProcessGroup | None = None) -> list[int]:
    """The maximum of each value over the ranks of a group, by default all; collective."""
    votes = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=group)
    return votes.tolist()


def known_deadline(config: PreemptionConfig, warns: bool) -> float | None:
    """Return the time of preemption, in seconds since 1970, from configuration and environment; None if unknown.

    Args:
        warns: whether this rank warns about variables that cannot be read.
    """
    from_environment = deadline_from_environment(warn if warns else lambda sentence: None)
    known = [parse_deadline(config.deadline), from_environment]
    return min((moment for moment in known if moment is not None), default=None)


def deadline_from_environment(warn: Callable[[str], None]) -> float | None:
    """Return the earliest future time of preemption in `DEADLINE_VARIABLES`.

    Args:
        warn: called with a message for each variable that cannot be read.

    Returns:
        Seconds since 1970; None if no variable has a future time.
    """
    times = []
    for name in DEADLINE_VARIABLES:
        text = os.environ.get(name, "")
        seconds = to_seconds(text)
        if text and seconds is None:
            warn(f"{name} is '{text}' instead of seconds since 1970, so this run ignores it")
        if seconds is not None and seconds > time.time():
            times.append(seconds)
    return min(times, default=None)
