"""Guards of a run that cannot learn: rewards that fail or take long, or an engine whose weights differ."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from verl_ext.console import warn
from verl_ext.distributed import gather_results, reduce_over_ranks
from verl_ext.errors import UserError
from verl_ext.grpo.protocols import Policy, RewardFailure, Trajectory

WARN_AFTER_S = 30.0
"""Seconds of waiting for rewards after which a line reports it."""
TIMED_OUT_STEPS = 3
"""Consecutive steps with only timeouts after which the run stops; a machine can be busy for one or two."""
TOTAL = "*"
"""Name of the number of samples among the names of reward functions."""
FLOAT32_GAP = 0.01
"""In nats. In float32, engine and trainer differ by less than 1e-4; a larger gap means that the weights differ."""
CHECKED_STEPS = 2
"""Steps to check after a start: the first uses the loaded weights, the second the weights after an update."""


class WaitGuard:
    """Warns if rewards take long, once per rollout, and then only if one takes more than twice the longest so far.

    Args:
        waiting_for: describes the missing rewards.
    """

    def __init__(self, waiting_for: Callable[[], str]) -> None:
        self._waiting_for, self._after_s = waiting_for, WARN_AFTER_S

    @contextmanager
    def watch(self, when: str) -> Iterator[None]:
        """Watch the wait in the `with` block; `when` names the step or validation."""
        start = time.monotonic()
        timer = threading.Timer(self._after_s, self._warn, [when])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            waited_s = time.monotonic() - start
            if waited_s > self._after_s:
                self._after_s = 2 * waited_s

    def _warn(self, when: str) -> None:
        missing = self._waiting_for()
        if not missing:  # the last one has just arrived, or the environment computes rewards itself
            return
        on_rank = f" on rank {dist.get_rank()}" if dist.get_world_size() > 1 else ""
        warn(f"{when}: waiting for rewards for {self._after_s:.0f} s{on_rank}: {missing}")


@dataclass
class FailureKind:
    """The failures of one reward function with one cause, in a step.

    Attributes:
        count: number of failed samples.
        failure: the first one.
        sample: a description of its sample.
    """

    count: int
    failure: RewardFailure
    sample: str


class RewardGuard:
    """Reports each cause of failing rewards once, and stops the run if a function fails on every sample of a step.

    Args:
        names: names of the reward functions, the same on every rank.
        describe: shows a sample in a report.
        device: device for reductions over ranks.
    """

    def __init__(self, names: Sequence[str], describe: Callable[[Trajectory], str], device: str) -> None:
        self.names, self.describe, self.device = names, describe, device
        self._reported: set[tuple[str, str]] = set()
        self._timed_out_steps: Counter[str] = Counter()

    def report(self, when: str, trajectories: Sequence[Trajectory]) -> tuple[float, dict[str, dict[str, FailureKind]]]:
        """Print the first failure of each new kind with its traceback; collective.

        Args:
            when: names the step or validation, such as `step 4`.
            trajectories: trajectories of this rank, with their rewards.

        Returns:
            Over all ranks, the number of samples, and the failures by function and kind.
        """
        sums = {name: sum(1.0 for _ in _failures(name, trajectories)) for name in self.names}
        counts = reduce_over_ranks(sums={**sums, TOTAL: len(trajectories)}, device=self.device)
        found = {name: self._kinds(name, trajectories) for name in self.names if counts[name]}
        for name, kinds in found.items():
            new = [kind for kind in kinds if (name, kind) not in self._reported]
            self._reported.update((name, kind) for kind in new)
            if new and dist.get_rank() == 0:
                first = sorted((kinds[kind] for kind in new), key=lambda each: not each.failure.traceback)
                shown = [f"{each.failure.reason}; {each.sample}\n{each.failure.traceback}".rstrip() for each in first]
                warn(
                    f"{when}: the reward {name} failed on {counts[name]:.0f} of {counts[TOTAL]:.0f} samples "
                    f"({summary(kinds)}), which therefore have no reward. Later failures with the same cause are only "
                    "counted, in train/reward_failures. First failure: " + "\nFirst failure: ".join(shown)
                )
        return counts[TOTAL], found

    def check(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Report, and stop the run if a function failed on all samples of all ranks; collective.

        If all of them timed out, the run stops after `TIMED_OUT_STEPS` such steps in a row.

        Raises:
            UserError: on every rank, before the step's update.
        """
        total, found = self.report(f"step {step}", trajectories)
        for name in self.names:
            kinds = found.get(name, {})
            all_failed = bool(kinds) and sum(each.count for each in kinds.values()) == total
            all_timed_out = all_failed and all(each.failure.timed_out for each in kinds.values())
            self._timed_out_steps[name] = self._timed_out_steps[name] + 1 if all_timed_out else 0
            if self._timed_out_steps[name] == TIMED_OUT_STEPS:
                what = f"timed out on every sample of {TIMED_OUT_STEPS} steps in a row"
                fix = "make it faster or raise reward.time_limit_s"
            elif all_failed and not all_timed_out:
                # a traceback helps more than, for example, a timeout
                cause = max(kinds.values(), key=lambda each: (bool(each.failure.traceback), each.count))
                several = f"{summary(kinds)}; for example, " if len(kinds) > 1 else ""
                what = f"failed on all {total:.0f} samples ({several}{cause.failure.reason})"
                fix = "fix the cause"
            else:
                continue
            raise UserError(
                f"step {step}: the reward {name} {what}. The model was not updated in this step; {fix}, then run the "
                "same command again (earlier checkpoints are intact)"
            )

    def _kinds(self, name: str, trajectories: Sequence[Trajectory]) -> dict[str, FailureKind]:
        """The failures of one function over all ranks by kind, the most frequent first; collective."""

        def of_rank() -> dict[str, FailureKind]:
            kinds: dict[str, FailureKind] = {}
            for trajectory, failure in _failures(name, trajectories):
                if failure.kind not in kinds:
                    is_new = (name, failure.kind) not in self._reported
                    kinds[failure.kind] = FailureKind(0, failure, self.describe(trajectory) if is_new else "")
                kinds[failure.kind].count += 1
            return kinds

        found: dict[str, FailureKind] = {}
        for kinds in gather_results(of_rank):
            for kind, each in kinds.items():
                found.setdefault(kind, replace(each, count=0)).count += each.count
        return dict(sorted(found.items(), key=lambda item: -item[1].count))


def summary(kinds: Mapping[str, FailureKind]) -> str:
    """The number of failures of each kind, such as `12 ZeroDivisionError, 5 None`."""
    return ", ".join(f"{each.count} {kind}" for kind, each in kinds.items())


def _failures(name: str, trajectories: Sequence[Trajectory]) -> Iterator[tuple[Trajectory, RewardFailure]]:
    """The trajectories for which one function failed."""
    for trajectory in trajectories:
        if trajectory.reward is not None and name in trajectory.reward.failures:
            yield trajectory, trajectory.reward.failures[name]


class EngineGuard:
    """Stops a run if the engine's weights differ from the trained model's; checks the first steps after each start.

    Args:
        policy: generates with an engine, and evaluates with the trained model.
        max_gap: largest allowed mean difference of their log-probabilities, in nats per token.
        micro_batch_size: samples per rank to compare, in one forward pass.
        device: device for reductions over ranks.
    """

    def __init__(self, policy: Policy, max_gap: float, micro_batch_size: int, device: str) -> None:
        self.policy, self.max_gap, self.micro_batch_size, self.device = policy, max_gap, micro_batch_size, device
        self._steps_left = CHECKED_STEPS if policy.engine_dtype is not None else 0

    def check(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Compare some trajectories with the model, and stop the run if any rank's engine differs; collective.

        Raises:
            UserError: on every rank, before the step's update.
        """
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        gap = self._gap(trajectories[: self.micro_batch_size])
        gap = reduce_over_ranks(maxima={"gap": gap}, device=self.device)["gap"]
        if not gap <= self.max_gap:
            raise UserError(
                f"step {step}: the engine's log-probabilities differ from the trained model's by {gap:.3g} nats "
                f"per token (limit: {self.max_gap:g}), so their weights differ. The model was not updated in this "
                "step; set rollout.engine=hf, then run the same command again (earlier checkpoints are intact)"
            )

    @torch.no_grad()
    def _gap(self, trajectories: Sequence[Trajectory]) -> float:
        micro_batch = self.policy.collate(trajectories)
        values = self.policy.log_probs(micro_batch).values.cpu()
        return float((values - micro_batch["rollout_log_probs"])[micro_batch["response_mask"].bool()].abs().mean())
