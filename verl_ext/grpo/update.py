"""The updates that one step makes from its experience."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from verl_ext.distributed import reduce_over_ranks
from verl_ext.grpo.config import ActorConfig
from verl_ext.grpo.experience import Experience
from verl_ext.grpo.loss import GlobalBatch, LossInputs, micro_batch_loss
from verl_ext.grpo.policy import MicroBatch, Policy
from verl_ext.metrics.timing import StepTimer
from verl_ext.verl_api import compute_rollout_correction_weights


@dataclass(frozen=True)
class UpdateSettings:
    """How an experience is gone through.

    Attributes:
        actor: the loss.
        num_mini_batches: updates in one pass over the experience.
        num_epochs: passes.
        micro_batch_size: samples in a forward pass.
        max_decisions: most decisions that a sample can have.
        correction: None, or the level ("token" or "sequence") and the threshold of truncated importance sampling.
    """

    actor: ActorConfig
    num_mini_batches: int
    num_epochs: int
    micro_batch_size: int
    max_decisions: int
    correction: tuple[str, float] | None = None

    @property
    def num_updates(self) -> int:
        """Of one step."""
        return self.num_mini_batches * self.num_epochs


@dataclass(frozen=True)
class Updated:
    """What a step's updates came to, over all ranks.

    Attributes:
        loss: mean over the updates.
        grad_norm: mean over the updates, before clipping.
        means: figures per decision, by name.
        maxima: the largest values, by name.
    """

    loss: float
    grad_norm: float
    means: dict[str, float]
    maxima: dict[str, float]


class Updater:
    """Makes updates; every rank has as many samples, and runs as many forward passes."""

    def __init__(
        self,
        policy: Policy,
        settings: UpdateSettings,
        num_ranks: int,
        optimizer_step: Callable[[float], float],
        timer: StepTimer,
        device: str,
        gather: Callable[[bool], None] = lambda is_last: None,
    ) -> None:
        """Put the parts together.

        Args:
            policy: what is trained.
            settings: of the updates.
            num_ranks: whose gradients are averaged.
            optimizer_step: updates by the gradient, given the loss; returns the gradient's norm.
            timer: told `shard` and `update`.
            device: of the model.
            gather: told before each forward pass whether it is an update's last; see `Gathering.begin`.
        """
        self._policy, self._settings, self._num_ranks = policy, settings, num_ranks
        self._optimizer_step, self._timer, self._device, self._gather = optimizer_step, timer, device, gather
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._maxima: defaultdict[str, float] = defaultdict(float)

    def update(self, experience: Experience) -> Updated:
        """All updates of one step; collective."""
        self._sums.clear()
        self._maxima.clear()
        with self._timer.measure("shard"):
            mini_batches = self._mini_batches(experience)
        with self._timer.measure("update"):
            self._evaluate_beforehand([micro for mini in mini_batches for micro in mini])
            results = [
                self._update(mini, in_first_pass=epoch == 0, is_first=epoch == number == 0)
                for epoch in range(self._settings.num_epochs)
                for number, mini in enumerate(mini_batches)
            ]
        sums = reduce_over_ranks(sums=dict(self._sums), device=self._device)
        maxima = reduce_over_ranks(maxima=dict(self._maxima), device=self._device)
        losses, norms = zip(*results)
        counts = {name: sums[f"{name} n"] for name in self._sums if not name.endswith(" n")}
        return Updated(
            sum(losses) / len(losses),
            sum(norms) / len(norms),
            {name: sums[name] / max(count, 1.0) for name, count in counts.items()},
            maxima,
        )

    def _mini_batches(self, experience: Experience) -> list[list[MicroBatch]]:
        """Whole groups in each; within one, samples that go well together share a forward pass."""
        size = len(experience.samples) // self._settings.num_mini_batches
        return [
            list(self._micro_batches(experience, range(start, start + size)))
            for start in range(0, size * self._settings.num_mini_batches, size)
        ]

    def _micro_batches(self, experience: Experience, numbers: range) -> Iterator[MicroBatch]:
        advantages = experience.advantages
        ordered = [numbers[place] for place in self._policy.order([experience.samples[number] for number in numbers])]
        for start in range(0, len(ordered), self._settings.micro_batch_size):
            chosen = ordered[start : start + self._settings.micro_batch_size]
            micro_batch = self._policy.collate([experience.samples[number] for number in chosen])
            values, rewarded = (each[chosen, None] for each in (advantages.values, advantages.rewarded))
            mask = micro_batch["mask"] * rewarded.to(micro_batch["mask"].dtype)
            yield {**micro_batch, "mask": mask, "advantages": values.expand(mask.shape)}

    @torch.no_grad()
    def _evaluate_beforehand(self, micro_batches: list[MicroBatch]) -> None:
        """What the first update would change, and what the frozen reference says."""
        for micro_batch in micro_batches:
            self._gather(False)
            if self._settings.num_updates > 1:
                micro_batch["old_log_probs"] = self._policy.log_probs(micro_batch).values.cpu()
            if self._settings.actor.use_kl_loss:
                micro_batch["reference_log_probs"] = self._policy.reference_log_probs(micro_batch).cpu()

    def _update(self, micro_batches: list[MicroBatch], in_first_pass: bool, is_first: bool) -> tuple[float, float]:
        """One update; returns loss and gradient norm."""
        batch = self._global_batch(micro_batches)
        total = 0.0
        for number, micro_batch in enumerate(micro_batches):
            self._gather(number == len(micro_batches) - 1)
            loss = self._loss(micro_batch, batch, in_first_pass, is_first)
            loss.backward()
            total += float(loss.detach())
        mean = reduce_over_ranks(sums={"loss": total}, device=self._device)["loss"] / self._num_ranks
        return mean, self._optimizer_step(mean)

    def _global_batch(self, micro_batches: list[MicroBatch]) -> GlobalBatch:
        masks = [micro_batch["mask"] for micro_batch in micro_batches]
        counts = {
            "decisions": sum(float(mask.sum()) for mask in masks),
            "samples": sum(float((mask.sum(-1) > 0).sum()) for mask in masks),
        }
        found = reduce_over_ranks(sums=counts, device=self._device)
        most = self._settings.max_decisions
        return GlobalBatch(max(found["decisions"], 1.0), max(found["samples"], 1.0), self._num_ranks, most)

    def _loss(self, micro_batch: MicroBatch, batch: GlobalBatch, in_first_pass: bool, is_first: bool) -> torch.Tensor:
        said = self._policy.log_probs(micro_batch)
        there = {name: tensor.to(said.values.device) for name, tensor in micro_batch.items()}
        mask = there["mask"].to(said.values.dtype)
        old = there.get("old_log_probs", said.values.detach())
        drift = (old - there["rollout_log_probs"]) * mask
        inputs = LossInputs(
            said.values,
            old,
            there["advantages"].to(said.values.dtype),
            mask,
            said.entropy,
            there.get("reference_log_probs"),
            self._importance(drift, mask),
        )
        loss = micro_batch_loss(inputs, self._settings.actor, batch)
        self._count(loss.sums, float(mask.sum()))
        if in_first_pass:
            self._count({"rollout_logprob_diff": float(drift.abs().sum())}, float(mask.sum()))
            self._largest("rollout_logprob_diff", drift.abs())
        if is_first:
            # with one update per step `old` is what the model says now, and its ratio to that is 1
            before = old if "old_log_probs" in there else there["rollout_log_probs"]
            self._largest("ratio_deviation", ((said.values.detach() - before).exp() - 1).abs() * mask)
        return loss.value

    def _importance(self, drift: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        if self._settings.correction is None:
            return None
        level, threshold = self._settings.correction
        weights, _ = compute_rollout_correction_weights(drift, mask, level, threshold)
        return weights

    def _count(self, sums: dict[str, float], num_decisions: float) -> None:
        for name, value in sums.items():
            self._sums[name] += value
            self._sums[f"{name} n"] += num_decisions

    def _largest(self, name: str, values: torch.Tensor) -> None:
        self._maxima[name] = max(self._maxima[name], float(values.max()))
