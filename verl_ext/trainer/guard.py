"""Stops a run that has nothing to learn from: its loss is not a number, or a reward function always fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch.distributed as dist

from verl_ext.collective import gather_results
from verl_ext.errors import UserError
from verl_ext.grpo.environment import Reward
from verl_ext.grpo.failure import RewardFailure
from verl_ext.grpo.policy import Sample
from verl_ext.metrics.notice import warn
from verl_ext.metrics.reduce import reduce_over_ranks

TIMED_OUT_STEPS = 3
"""Steps in a row in which every call of a reward function timed out, after which the run stops; a machine may be busy
for one or two."""


class NonFiniteGuard:
    """Counts steps in a row without a finite loss and gradient; the caller leaves the weights alone on each of them.

    Args:
        limit: steps in a row after which the run stops.
        describe: names samples by their numbers in the training set.
    """

    def __init__(self, limit: int, describe: Callable[[Sequence[int]], str]) -> None:
        self.limit, self.describe = limit, describe
        self.streak = 0
        self.num_skipped = 0

    def count(self, finite: bool) -> None:
        """Count one step, by whether its loss and gradient norm are finite; the same on every rank."""
        self.streak = 0 if finite else self.streak + 1
        self.num_skipped += not finite

    def check(self, step: int, rows: Sequence[int]) -> None:
        """Stop the run when the limit is reached; collective then.

        Args:
            step: the optimizer step, for the message.
            rows: this rank's samples of the step.

        Raises:
            UserError: it names the step and every rank's rows.
        """
        if self.streak < self.limit:
            return
        everyone = gather_results(lambda: list(rows))
        raise UserError(
            f"the loss or its gradient was not finite for {self.streak} steps in a row, the last at step {step}; lower "
            "optim.lr, check the model's weights, or look at the batch: "
            f"{self.describe(sorted({row for part in everyone for row in part}))} "
            "(no update was made on those steps, and the last checkpoint is intact)"
        )


class RewardGuard:
    """Reports each failing reward function once, and stops the run when one fails on every sample of a step.

    Args:
        names: of the reward functions, the same on every rank.
        describe: shows a sample in a report.
        device: for reductions over ranks.
    """

    def __init__(self, names: Sequence[str], describe: Callable[[Sample], str], device: str) -> None:
        self.names, self.describe, self.device = names, describe, device
        self._reported: set[str] = set()
        self._timed_out_steps: Counter[str] = Counter()

    def report(self, when: str, samples: Sequence[Sample], rewards: Sequence[Reward]) -> dict[str, float]:
        """Print each function's first failure with its traceback; collective.

        Args:
            when: the samples were rewarded, such as `step 4`.
            samples: of this rank.
            rewards: of each.

        Returns:
            Over all ranks the number of `samples`, and by function that of `NAME failed` and `NAME timed out`.
        """
        counts = self._counts(rewards)
        for name in self.names:
            failed = counts[f"{name} failed"]
            if not failed or name in self._reported:
                continue
            self._reported.add(name)
            failure, sample = self._first(name, samples, rewards)
            if dist.get_rank() == 0:
                more = f"{sample}\n{failure.traceback}".rstrip()
                warn(
                    f"{when}: the reward {name} failed on {failed:.0f} of {counts['samples']:.0f} samples, which "
                    f"therefore have no reward: {failure.reason}. Further failures are only counted, in "
                    f"train/reward_failures. This was {more}"
                )
        return counts

    def check(self, step: int, samples: Sequence[Sample], rewards: Sequence[Reward]) -> None:
        """Report, and stop the run where a function failed on all samples of all ranks; collective.

        Where all of them were time-outs, the run stops after `TIMED_OUT_STEPS` such steps in a row.

        Args:
            step: the optimizer step.
            samples: of this rank.
            rewards: of each.

        Raises:
            UserError: on every rank, before the step's update.
        """
        counts = self.report(f"step {step}", samples, rewards)
        total = counts["samples"]
        for name in self.names:
            all_failed, all_timed_out = (counts[f"{name} {what}"] == total for what in ("failed", "timed out"))
            self._timed_out_steps[name] = self._timed_out_steps[name] + 1 if all_timed_out else 0
            if self._timed_out_steps[name] == TIMED_OUT_STEPS:
                what = f"timed out on every sample of {TIMED_OUT_STEPS} steps in a row"
                fix = "make it faster or raise reward.time_limit_s"
            elif all_failed and not all_timed_out:
                what = f"failed on all {total:.0f} samples ({self._first(name, samples, rewards)[0].reason})"
                fix = "fix the cause"
            else:
                continue
            raise UserError(
                f"step {step}: the reward {name} {what}, and no update was made from this step; {fix}, then start the "
                "same command again (earlier checkpoints are intact)"
            )

    def _counts(self, rewards: Sequence[Reward]) -> dict[str, float]:
        sums = {"samples": float(len(rewards))}
        for name in self.names:
            failures = [reward.failures[name] for reward in rewards if name in reward.failures]
            sums[f"{name} failed"] = len(failures)
            sums[f"{name} timed out"] = sum(failure.timed_out for failure in failures)
        return reduce_over_ranks(sums=sums, device=self.device)

    def _first(self, name: str, samples: Sequence[Sample], rewards: Sequence[Reward]) -> tuple[RewardFailure, str]:
        """A failure of one function with its sample, of the first rank that has one; collective."""

        def of_this_rank() -> tuple[RewardFailure, str] | None:
            pairs = zip(samples, rewards)
            return next(
                ((reward.failures[name], self.describe(sample)) for sample, reward in pairs if name in reward.failures),
                None,
            )

        return next(found for found in gather_results(of_this_rank) if found is not None)
