"""Guards that stop a run that cannot learn: rewards that always fail, or an engine whose weights differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from verl_ext.console import warn
from verl_ext.distributed import gather_results, reduce_over_ranks
from verl_ext.errors import UserError
from verl_ext.grpo.protocols import Policy, RewardFailure, Trajectory

TIMED_OUT_STEPS = 3
"""Consecutive steps with only time-outs after which the run stops; a machine can be busy for one or two."""
FLOAT32_GAP = 0.01
"""In nats. In float32, engine and trainer differ by less than 1e-4; a larger gap means that the weights differ."""
CHECKED_STEPS = 2
"""Steps to check after a start: the first uses the loaded weights, the second the weights after an update."""


class RewardGuard:
    """Reports each failing reward function once, and stops the run if one fails on every sample of a step.

    Args:
        names: names of the reward functions, the same on every rank.
        describe: shows a sample in a report.
        device: device for reductions over ranks.
    """

    def __init__(self, names: Sequence[str], describe: Callable[[Trajectory], str], device: str) -> None:
        self.names, self.describe, self.device = names, describe, device
        self._reported: set[str] = set()
        self._timed_out_steps: Counter[str] = Counter()

    def report(self, when: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """Print each function's first failure with its traceback; collective.

        Args:
            when: names the step or validation, such as `step 4`.
            trajectories: trajectories of this rank, with their rewards.

        Returns:
            Counts over all ranks: `samples`, and `NAME failed` and `NAME timed out` for each function.
        """
        sums = {"samples": float(len(trajectories))}
        for name in self.names:
            failures = [failure for _, failure in _failures(name, trajectories)]
            sums[f"{name} failed"] = len(failures)
            sums[f"{name} timed out"] = sum(failure.timed_out for failure in failures)
        counts = reduce_over_ranks(sums=sums, device=self.device)
        for name in self.names:
            failed = counts[f"{name} failed"]
            if not failed or name in self._reported:
                continue
            self._reported.add(name)
            failure, sample = self._first(name, trajectories)
            if dist.get_rank() == 0:
                more = f"{sample}\n{failure.traceback}".rstrip()
                warn(
                    f"{when}: the reward {name} failed on {failed:.0f} of {counts['samples']:.0f} samples, which "
                    f"therefore have no reward: {failure.reason}. Further failures are only counted, in "
                    f"train/reward_failures. First failure: {more}"
                )
        return counts

    def check(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Report, and stop the run if a function failed on all samples of all ranks; collective.

        If all of them timed out, the run stops after `TIMED_OUT_STEPS` such steps in a row.

        Raises:
            UserError: on every rank, before the step's update.
        """
        counts = self.report(f"step {step}", trajectories)
        total = counts["samples"]
        for name in self.names:
            all_failed, all_timed_out = (counts[f"{name} {what}"] == total for what in ("failed", "timed out"))
            self._timed_out_steps[name] = self._timed_out_steps[name] + 1 if all_timed_out else 0
            if self._timed_out_steps[name] == TIMED_OUT_STEPS:
                what = f"timed out on every sample of {TIMED_OUT_STEPS} steps in a row"
                fix = "make it faster or raise reward.time_limit_s"
            elif all_failed and not all_timed_out:
                what = f"failed on all {total:.0f} samples ({self._first(name, trajectories)[0].reason})"
                fix = "fix the cause"
            else:
                continue
            raise UserError(
                f"step {step}: the reward {name} {what}. The model was not updated in this step; {fix}, then run the "
                "same command again (earlier checkpoints are intact)"
            )

    def _first(self, name: str, trajectories: Sequence[Trajectory]) -> tuple[RewardFailure, str]:
        """A failure of one function and its sample, from the first rank that has one; collective."""

        def first_of_rank() -> tuple[RewardFailure, str] | None:
            return next(
                ((failure, self.describe(trajectory)) for trajectory, failure in _failures(name, trajectories)), None
            )

        return next(found for found in gather_results(first_of_rank) if found is not None)


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
