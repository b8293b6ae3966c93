"""One step of GRPO for any policy and environment: generate, reward, compute advantages, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import torch
import torch.distributed as dist

from verl_ext.distributed import gather_results, reduce_over_ranks
from verl_ext.grpo.algorithm import (
    GlobalBatch,
    LossInputs,
    group_advantages,
    has_signal,
    micro_batch_loss,
    rollout_is_weights,
)
from verl_ext.grpo.config import ActorConfig, AlgorithmConfig
from verl_ext.grpo.guards import EngineGuard, RewardGuard, WaitGuard
from verl_ext.grpo.metrics import ALL_STATISTICS, UpdateMetrics, describe, distribution_metrics
from verl_ext.grpo.protocols import Environment, Metrics, MicroBatch, Policy, Prompt, Trajectory
from verl_ext.metrics.timing import StepTimer, TraceFile


@dataclass(frozen=True)
class MiniBatch:
    """The micro-batches of one update.

    Attributes:
        without_gradient: those whose advantages are all 0; they count in the metrics and in means over tokens.
        trained: the others, at least one.
        global_batch: counts over the mini-batches of all ranks.
    """

    without_gradient: list[MicroBatch]
    trained: list[MicroBatch]
    global_batch: GlobalBatch

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """All micro-batches."""
        return self.without_gradient + self.trained

    @property
    def has_loss(self) -> bool:
        """Whether any sample of any rank has a reward."""
        return self.global_batch.num_decisions > 0


@dataclass(eq=False)
class GRPOStep:
    """Runs training steps. Every method is collective; `run` needs the same number of prompts on each rank.

    Attributes:
        policy: the trained model; generates actions and evaluates them.
        environment: rewards actions.
        algorithm: settings of advantages, dynamic sampling and rollout correction.
        actor: settings of the loss.
        group_size: samples per prompt.
        num_mini_batches: updates in one pass over the samples.
        micro_batch_size: samples in a forward pass.
        max_decisions: maximum number of decisions in a sample.
        num_ranks: number of ranks whose gradients are averaged.
        optimizer_step: updates the model, given the loss over all ranks; returns the gradient norm.
        skip_update: called instead if no sample of an update has a reward on any rank.
        timer: measures `rollout`, `reward`, `advantages`, `shard` and `update`.
        device: device for reductions over ranks.
        before_micro_batch: called before each forward pass; its argument says whether it is an update's last one.
        is_interrupted: whether this rank must skip the rest of its work and call `wait`, which then raises.
        wait: called after generation, and before and after rewards are used, with a function that is true while this
            rank must wait; may raise `Stop`.
        replacement_prompts: given a round of dynamic sampling, from 1, and the numbers of this rank's groups among all
            groups to replace, ascending, returns a prompt for each; for the last ones none if there are too few.
        before_update: called with the trajectories of this rank before the update.
        max_engine_gap: see `EngineGuard`.
        trace: records the events of each sample; None disables it.
    """

    policy: Policy
    environment: Environment
    algorithm: AlgorithmConfig
    actor: ActorConfig
    _: KW_ONLY
    group_size: int
    num_mini_batches: int
    micro_batch_size: int
    max_decisions: int
    num_ranks: int
    optimizer_step: Callable[[float], float]
    skip_update: Callable[[], None]
    timer: StepTimer
    device: str
    before_micro_batch: Callable[[bool], None]
    is_interrupted: Callable[[], bool]
    wait: Callable[[Callable[[], object]], None]
    replacement_prompts: Callable[[int, Sequence[int]], Sequence[Prompt]]
    before_update: Callable[[Sequence[Trajectory]], None]
    max_engine_gap: float
    trace: TraceFile | None

    def __post_init__(self) -> None:
        names, device = self.environment.reward_names, self.device
        self.reward_guard = RewardGuard(names, lambda each: describe(each, self.policy), device)
        self.wait_guard = WaitGuard(self.environment.waiting_for)
        self.engine_guard = EngineGuard(self.policy, self.max_engine_gap, self.micro_batch_size, device)

    def run(self, prompts: Sequence[Prompt], step: int) -> tuple[list[Trajectory], Metrics]:
        """Run one step.

        Args:
            prompts: prompts of this rank.
            step: number of the training step, from 1.

        Returns:
            The trajectories, group by group, with their advantages; and metrics of groups and updates.

        Raises:
            UserError: a reward always fails, or the engine's weights differ from the model's.
        """
        with self.policy.sampling(version=step - 1) as sync_metrics:
            trajectories = self.rollout(prompts, step, self.group_size)
            num_replaced = self.replace_groups_without_signal(trajectories, step)
        self.reward_guard.check(step, trajectories)
        self.engine_guard.check(step, trajectories)
        with self.timer.measure("advantages"):
            rewards = [trajectory.total_reward for trajectory in trajectories]
            advantages = group_advantages(rewards, self.group_size, self.algorithm.norm_adv_by_std_in_grpo)
            for trajectory, advantage in zip(trajectories, advantages):
                trajectory.advantage = advantage
        self.before_update(trajectories)
        start = time.perf_counter()
        metrics = self.update(trajectories)
        self._trace_update(step, trajectories, start)
        counts = {
            "train/num_groups": len(trajectories) // self.group_size,
            "train/groups_without_signal": len(self._groups_without_signal(trajectories)),
            "train/groups_replaced": num_replaced,
        }
        return trajectories, {
            **metrics,
            **distribution_metrics({"train/adv": advantages}, {"train/adv": ALL_STATISTICS}, self.device),
            **reduce_over_ranks(sums=counts, device=self.device),
            **sync_metrics,
        }

    # Generate and reward

    def rollout(self, prompts: Sequence[Prompt], step: int, group_size: int, greedy: bool = False) -> list[Trajectory]:
        """Run episodes and return them in the order of prompts and numbers; inside `Policy.sampling`."""
        trajectories = [self.environment.reset(prompt, number) for prompt in prompts for number in range(group_size)]
        live, run_name = trajectories, f"eval {step}" if greedy else f"{step}"
        when = f"{'evaluation at ' if greedy else ''}step {step}"
        for _ in range(self.environment.max_turns):
            start, waits = time.perf_counter(), []
            with self.timer.measure("rollout"):  # rewards are computed while other trajectories still generate
                for trajectory in self.policy.generate(live, step, greedy):
                    waits.append((trajectory, self.environment.step(trajectory), time.perf_counter()))
                self.wait(lambda: False)  # for the slowest rank
            with self.timer.measure("reward"), self.wait_guard.watch(when):
                self.wait(self.environment.waiting_for)
                for trajectory, wait, generated_at in waits:
                    if self.is_interrupted():
                        break
                    trajectory.advance(wait())
                    self._trace_turn(run_name, trajectory, start, generated_at)
                self.wait(self.environment.waiting_for)
            live = [trajectory for trajectory in trajectories if trajectory.reward is None]
            # every rank runs the same number of rounds; with a single turn there is nothing to agree on
            if self.environment.max_turns > 1 and not self._largest(len(live)):
                break
        assert not live, "the environment gives a reward in its last round"
        self.environment.end_batch()
        return trajectories

    def replace_groups_without_signal(self, trajectories: list[Trajectory], step: int) -> int:
        """Replace groups of equal rewards with groups of other prompts: dynamic sampling (DAPO, arXiv 2503.14476).

        Each such group has one candidate per round, whichever rank trains it, so the number of ranks changes nothing.

        Returns:
            Number of replaced groups; groups still without signal after the last round stay.
        """
        size, num_replaced = self.group_size, 0
        for round_number in range(1, self.algorithm.dynamic_sampling.max_rounds + 1):
            places = self._groups_without_signal(trajectories)
            if not self._largest(len(places)):
                break
            self.reward_guard.report(f"step {step}", trajectories)  # groups without rewards are replaced, too
            per_update = len(trajectories) // size // self.num_mini_batches
            numbers = self._numbers_in_step([place // size for place in places], per_update)
            fresh = self.rollout(self.replacement_prompts(round_number, numbers), step, size)
            self.reward_guard.report(f"step {step}", fresh)
            unusable = self._groups_without_signal(fresh)
            for place, start in zip(places, range(0, len(fresh), size)):
                if start not in unusable:
                    trajectories[place : place + size] = fresh[start : start + size]
                    num_replaced += 1
        return num_replaced

    def _groups_without_signal(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """Index of the first trajectory of each group whose rewards do not differ."""
        rewards = [trajectory.total_reward for trajectory in trajectories]
        starts = range(0, len(rewards), self.group_size)
        return [start for start in starts if not has_signal(rewards[start : start + self.group_size])]

    @staticmethod
    def _numbers_in_step(groups: list[int], per_update: int) -> list[int]:
        return numbers_in_step(gather_results(lambda: groups), per_update)[dist.get_rank()]

    def _largest(self, count: int) -> float:
        return reduce_over_ranks(maxima={"count": count}, device=self.device)["count"]

    # Update

    def update(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Run the updates of a step that have a loss, and return their metrics: none without any."""
        metrics = UpdateMetrics(self.device)
        with self.timer.measure("shard"):
            size = len(trajectories) // self.num_mini_batches  # whole groups
            starts = range(0, size * self.num_mini_batches, size)
            mini_batches = [self._mini_batch(trajectories[start : start + size]) for start in starts]
        with self.timer.measure("update"):
            with_loss = [each for each in mini_batches if each.has_loss]
            self._add_old_and_reference_log_probs(with_loss)
            for epoch in range(self.actor.ppo_epochs):
                for mini_batch in mini_batches:
                    if mini_batch.has_loss:
                        self._run_update(mini_batch, metrics, epoch, epoch == 0 and mini_batch is with_loss[0])
                    else:
                        self.skip_update()
        return metrics.reduced()

    def _mini_batch(self, trajectories: Sequence[Trajectory]) -> MiniBatch:
        without_gradient, trained = self._split_by_gradient(trajectories)
        parts = self._micro_batches(without_gradient), self._micro_batches(trained)
        return MiniBatch(*parts, self._global_batch(parts[0] + parts[1]))

    def _split_by_gradient(self, trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[Trajectory]]:
        """Split off groups whose advantages are 0, in whole micro-batches, the same number on each rank.

        With FSDP, all ranks must run the same sequence of forward and backward passes.
        """
        without_gradient: list[Trajectory] = []
        trained: list[Trajectory] = []
        for start in range(0, len(trajectories), self.group_size):
            group = trajectories[start : start + self.group_size]
            has_gradient = not self.actor.has_only_policy_gradient or any(each.advantage for each in group)
            (trained if has_gradient else without_gradient).extend(group)
        size = self.micro_batch_size
        possible = min(len(without_gradient), len(trajectories) - 1) // size  # at least one sample is trained
        num_split = int(-self._largest(-possible)) * size
        return without_gradient[:num_split], trained + without_gradient[num_split:]

    def _micro_batches(self, trajectories: Sequence[Trajectory]) -> list[MicroBatch]:
        ordered = self.policy.sort_by_cost(trajectories) if trajectories else []
        micro_batches = []
        for start in range(0, len(ordered), self.micro_batch_size):
            chosen = ordered[start : start + self.micro_batch_size]
            micro_batch = self.policy.collate(chosen)
            mask = micro_batch["response_mask"]
            rewarded = torch.tensor([[trajectory.total_reward is not None] for trajectory in chosen])
            advantages = torch.tensor([[trajectory.advantage] for trajectory in chosen])
            micro_batch["loss_mask"] = mask * rewarded.to(mask.dtype)
            micro_batch["advantages"] = advantages.expand(mask.shape)
            micro_batches.append(micro_batch)
        return micro_batches

    @torch.no_grad()
    def _add_old_and_reference_log_probs(self, mini_batches: list[MiniBatch]) -> None:
        """Add log-probabilities under the model before several updates, and under the reference for a KL term."""
        for micro_batch in (each for mini_batch in mini_batches for each in mini_batch.micro_batches):
            self.before_micro_batch(False)
            if len(mini_batches) * self.actor.ppo_epochs > 1:
                micro_batch["old_log_probs"] = self.policy.log_probs(micro_batch).values.cpu()
            if self.actor.use_kl_loss:
                micro_batch["reference_log_probs"] = self.policy.reference_log_probs(micro_batch).cpu()

    def _run_update(self, mini_batch: MiniBatch, metrics: UpdateMetrics, epoch: int, is_first: bool) -> None:
        batch, total = mini_batch.global_batch, 0.0
        with torch.no_grad():
            for micro_batch in mini_batch.without_gradient:
                self.before_micro_batch(False)
                total += float(self._loss(micro_batch, batch, metrics, epoch, is_first))
        for number, micro_batch in enumerate(mini_batch.trained):
            self.before_micro_batch(number == len(mini_batch.trained) - 1)
            loss = self._loss(micro_batch, batch, metrics, epoch, is_first)
            loss.backward()
            total += float(loss.detach())
        mean = reduce_over_ranks(sums={"loss": total}, device=self.device)["loss"] / self.num_ranks
        metrics.add_update(mean, self.optimizer_step(mean))

    def _global_batch(self, mini_batch: list[MicroBatch]) -> GlobalBatch:
        masks = [micro_batch["loss_mask"] for micro_batch in mini_batch]
        counts = {
            "decisions": sum(float(mask.sum()) for mask in masks),
            "samples": sum(float((mask.sum(-1) > 0).sum()) for mask in masks),
        }
        found = reduce_over_ranks(sums=counts, device=self.device)
        return GlobalBatch(found["decisions"], found["samples"], self.num_ranks, self.max_decisions)

    def _loss(
        self, micro_batch: MicroBatch, batch: GlobalBatch, metrics: UpdateMetrics, epoch: int, is_first: bool
    ) -> torch.Tensor:
        output = self.policy.log_probs(micro_batch)
        log_probs = output.values
        tensors = {name: tensor.to(log_probs.device) for name, tensor in micro_batch.items()}
        mask, rollout_log_probs = tensors["loss_mask"].to(log_probs.dtype), tensors["rollout_log_probs"]
        # with a single update, the old model is the current one
        old_log_probs = tensors.get("old_log_probs", log_probs.detach())
        rollout_log_ratio = (old_log_probs - rollout_log_probs) * mask
        inputs = LossInputs(
            log_probs,
            old_log_probs,
            tensors["advantages"].to(log_probs.dtype),
            mask,
            output.entropy,
            tensors.get("reference_log_probs"),
            rollout_is_weights(rollout_log_ratio, mask, self.algorithm),
            output.entropy_bonus,
        )
        value, sums = micro_batch_loss(inputs, self.actor, batch)
        num_decisions = float(mask.sum())
        metrics.add_sums(sums, num_decisions)
        if epoch == 0:
            metrics.add_sums({"rollout_logprob_diff": float(rollout_log_ratio.abs().sum())}, num_decisions)
            metrics.add_maximum("rollout_logprob_diff", rollout_log_ratio.abs())
        if is_first:
            # with a single update, the ratio to `old_log_probs` is 1 by construction
            before = old_log_probs if "old_log_probs" in tensors else rollout_log_probs
            metrics.add_maximum("ratio_deviation", ((log_probs.detach() - before).exp() - 1).abs() * mask)
        return value

    # Trace

    def _trace_turn(self, run_name: str, trajectory: Trajectory, start: float, generated_at: float) -> None:
        if self.trace is not None:
            identity = f"{run_name}/{trajectory.prompt.sample_id}/{trajectory.number}"
            finished_at = trajectory.reward.finished_at if trajectory.reward is not None else time.perf_counter()
            self.trace.async_span(identity, "rollout", start, generated_at)
            total = trajectory.total_reward
            self.trace.async_span(identity, "reward", generated_at, max(finished_at, generated_at), total=total)

    def _trace_update(self, step: int, trajectories: Sequence[Trajectory], start: float) -> None:
        if self.trace is not None:
            for trajectory in trajectories:
                identity = f"{step}/{trajectory.prompt.sample_id}/{trajectory.number}"
                self.trace.async_span(identity, "update", start, time.perf_counter())


def numbers_in_step(groups: Sequence[Sequence[int]], per_update: int) -> list[list[int]]:
    """Number some groups of all ranks in the order of the step's prompts, which every update splits over the ranks.

    Args:
        groups: for each rank, the indices of some of its groups, ascending.
        per_update: groups of a rank in each update.
    """
    order = sorted((index // per_update, rank, index) for rank, indices in enumerate(groups) for index in indices)
    number_of = {(rank, index): number for number, (_, rank, index) in enumerate(order)}
    return [[number_of[rank, index] for index in indices] for rank, indices in enumerate(groups)]
