"""GRPO: draw groups of actions, reward them, learn from what was better than its group; whatever an action is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from verl_ext.data.prompts import PromptBatch
from verl_ext.distributed import gather_results, reduce_over_ranks
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.experience import Collector, Experience, Replacement
from verl_ext.grpo.policy import Policy, Prompt, Sample
from verl_ext.grpo.update import Updater, UpdateSettings
from verl_ext.trainer.gathering import Gathering, keeps_gathered
from verl_ext.trainer.grpo_parts import make_environment, make_policy
from verl_ext.trainer.grpo_report import GRPOReport
from verl_ext.trainer.guard import FLOAT32_GAP, EngineGuard, RewardGuard
from verl_ext.trainer.hardware import peak_memory, pick_precision
from verl_ext.trainer.loop import Metrics, PipelineTrainer
from verl_ext.trainer.model import disable_dropout
from verl_ext.trainer.stages import GRPOConfig, RewardStageConfig


class GRPOTrainer(PipelineTrainer):
    """One step is a batch of prompts, a group of actions for each, and one or more updates from them."""

    config: RewardStageConfig

    def __init__(self, *arguments: Any) -> None:
        """See `PipelineTrainer`; policy and environment are built when the model is there."""
        super().__init__(*arguments)
        algorithm, settings = self.config.algorithm, self.update_settings()
        self.environment: Environment = self.make_environment()
        with torch.random.fork_rng(devices=[]):  # a resumed run must not depend on what building an engine draws
            self.policy: Policy = self.make_policy()
        self.collector = Collector(
            self.policy,
            self.environment,
            group_size=self.config.rollout.n,
            divide_by_std=algorithm.norm_adv_by_std_in_grpo,
            timer=self.timer,
            device=self.device_name,
            trace=self.trace,
        )
        self.updater = Updater(
            self.policy,
            settings,
            dist.get_world_size(),
            self.update_weights,
            self.timer,
            self.device_name,
            self.make_gathering().begin,
        )
        self.report = GRPOReport(self.policy, self.environment, self.device_name)
        self.reward_guard = RewardGuard(self.environment.names, self.report.describe, self.device_name)
        self.engine_guard = EngineGuard(
            self.policy, self.max_engine_gap(), self.config.data.micro_batch_size_per_gpu, self.device_name
        )
        rounds = algorithm.dynamic_sampling.max_rounds
        self.replacement = Replacement(rounds, self.further_prompts) if rounds else None

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        disable_dropout(self.fsdp_model)  # else a ratio would tell of dropout's noise before it tells of an update

    @property
    def token_config(self) -> GRPOConfig:
        """The configuration of a language model's GRPO."""
        assert isinstance(self.config, GRPOConfig)
        return self.config

    def make_environment(self) -> Environment:
        """What rewards: the reward functions of the recipe."""
        return make_environment(self.token_config)

    def make_policy(self) -> Policy:
        """What is trained: the language model; collective."""
        return make_policy(self.token_config, self.fsdp_model, self.tokenizer, self.device_mesh)

    def make_gathering(self) -> Gathering:
        """What stays gathered between the micro-batches of an update."""
        model = self.token_config.model
        precision = pick_precision(model.mixed_precision, self.device_name)
        keeps = keeps_gathered(model.fsdp_config.keep_gathered, self.fsdp_model, precision, self.device_name)
        return Gathering(self.fsdp_model, keeps)

    def max_engine_gap(self) -> float:
        """nat; how far log-probabilities of engine and trainer may be apart in their number types."""
        trained = {parameter.dtype for parameter in self.fsdp_model.parameters()}
        dtypes = {self.policy.engine_dtype, pick_precision(self.config.model.mixed_precision, self.device_name)}
        return FLOAT32_GAP if dtypes | trained == {torch.float32} else self.config.health.limits.logprob_gap_alarm

    def fit(self) -> None:
        """See `PipelineTrainer.fit`; what draws and what rewards end with it."""
        try:
            super().fit()
        finally:
            try:
                self.environment.close()
            finally:
                self.policy.close()

    @property
    def updates_per_step(self) -> int:
        """See `TrainerSetup`."""
        return self.update_settings().num_updates

    def update_settings(self) -> UpdateSettings:
        """The sections `actor` and `algorithm` as the updates read them."""
        actor, data = self.config.actor, self.config.data
        return UpdateSettings(
            actor=actor,
            num_mini_batches=data.train_batch_size // (actor.ppo_mini_batch_size or data.train_batch_size),
            num_epochs=actor.ppo_epochs,
            micro_batch_size=data.micro_batch_size_per_gpu,
            max_decisions=self.max_decisions,
            correction=self.rollout_correction(),
        )

    def update_weights(self, loss: float) -> float:
        """One update; returns the gradient's norm."""
        return self.optimizer_step(loss)[1]

    def rollout_correction(self) -> tuple[str, float] | None:
        """Level and threshold of truncated importance sampling, None for none of it."""
        correction = self.token_config.algorithm.rollout_correction
        return (correction.rollout_is, correction.rollout_is_threshold) if correction.rollout_is else None

    @property
    def max_decisions(self) -> int:
        """Most decisions that a sample can have."""
        return self.token_config.data.max_response_length

    def make_batcher(self) -> Callable[[list[dict[str, Any]]], Any]:
        """See `TrainerSetup.make_batcher`."""
        return PromptBatch

    def training_step(self, batch: PromptBatch) -> Metrics:
        """See `PipelineTrainer.training_step`."""
        lr = self.lr_scheduler.get_last_lr()[0]
        self.fsdp_model.train()
        self.rows_of_step = {row for rows in gather_results(lambda: batch.rows) for row in rows}
        with self.policy.drawing(self.global_step - 1) as weights:
            experience = self.collector.collect(prompts_of(batch.items), self.global_step, self.replacement)
            compared = self.engine_guard.draw(self.global_step, experience.samples)
        self.reward_guard.check(self.global_step, experience.samples, experience.rewards)
        self.engine_guard.check(self.global_step, compared)
        self.show_samples(experience)
        start = time.perf_counter()
        updated = self.updater.update(experience)
        self.trace_update(experience.samples, start)
        return {
            **self.report.update_figures(experience, updated),
            "train/lr(1e-3)": lr * 1e3,
            "train/epoch": self.global_step / self.steps_per_epoch,
            "train/skipped_steps": self.guard.num_skipped,
            **weights,
            **({"weights/version": float(self.global_step - 1)} if weights else {}),
            **self.measure_step(self.report.figures("train", experience.samples, experience.rewards)),
        }

    @torch.no_grad()
    def validate(self) -> Metrics:
        """The rewards of the likeliest actions for some prompts, none of which is learnt from."""
        batches = self.measured_prompts()
        if not batches:
            return {}
        start = time.perf_counter()
        samples: list[Sample] = []
        rewards: list[Reward] = []
        with self.policy.drawing(self.global_step):  # a stop in between leaves the GPU to the save
            for prompts in batches:
                self.preemption.check()
                begun = time.perf_counter()
                more_samples, more_rewards = self.collector.rewarded(prompts, self.global_step, 1, greedy=True)
                if self.preemption.longest_step_s:  # it may be longer than a step, and stops no run that made none
                    self.preemption.note(step_s=time.perf_counter() - begun)
                samples += more_samples
                rewards += more_rewards
        self.reward_guard.report(f"measurement at step {self.global_step}", samples, rewards)
        parts = {f"time/eval/{name}_s": seconds for name, seconds in self.timer.pop().items()}
        parts["time/eval/step_s"] = time.perf_counter() - start
        found = self.report.figures("eval", samples, rewards)
        found |= reduce_over_ranks(maxima=parts, device=self.device_name)
        decisions = found[f"eval/{self.policy.count_name}"]
        found[f"throughput/eval/{self.policy.rate_name}"] = decisions / found["time/eval/step_s"]
        return found

    def measured_prompts(self) -> list[list[Prompt]]:
        """This rank's share of the prompts that are measured, as many batches on every rank; a share may be empty."""
        data = self.config.data
        dataset = self.val_dataset if data.eval_split == "test" else self.train_dataset
        if dataset is None or data.eval_every_steps == 0:
            return []
        size = data.train_batch_size
        most = len(dataset) if data.eval_batches < 0 else min(data.eval_batches * size, len(dataset))
        return [
            prompts_of([dataset[row] for row in range(first + self.dp_rank, min(first + size, most), self.dp_size)])
            for first in range(0, most, size)
        ]

    def further_prompts(self, number: int, count: int) -> Sequence[Prompt]:
        """Prompts for a round of dynamic sampling; the same in a resumed run, and others on each rank."""
        seed = hash((self.config.trainer.seed, self.global_step)) % (1 << 31)
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        # whole batches, as many as there are rounds: no prompt is asked twice in a step
        size = self.config.data.train_batch_size
        fresh = [row for row in order if row not in self.rows_of_step][(number - 1) * size : number * size]
        return prompts_of([self.train_dataset[row] for row in fresh[self.dp_rank :: self.dp_size][:count]])

    def trace_update(self, samples: Sequence[Sample], start: float) -> None:
        """The last part of each sample's life."""
        if self.trace is not None:
            for sample in samples:
                identity = f"{self.global_step}/{sample.prompt.sample_id}/{sample.number}"
                self.trace.async_span(identity, "update", start, time.perf_counter())

    def show_samples(self, experience: Experience) -> None:
        """Write some of rank 0's samples, every so many steps."""
        trainer = self.config.trainer
        if trainer.log_samples_every and self.global_step % trainer.log_samples_every == 0:
            self.attempt.log_samples(self.global_step, self.report.rows(experience, trainer.samples_per_table))

    def measure_step(self, figures: Metrics) -> Metrics:
        """The figures of a step with where its time went: the slowest rank's seconds, all ranks' throughput."""
        parts = {f"time/train/{part}_s": value for part, value in self.timer.pop().items()}
        parts["time/train/step_s"] = time.perf_counter() - self.step_start
        maxima = {**parts, **peak_memory(self.device_name)}
        found = {**figures, **reduce_over_ranks(maxima=maxima, device=self.device_name)}
        decisions, rate = found[f"train/{self.policy.count_name}"], f"throughput/train/{self.policy.rate_name}"
        found[rate] = decisions / found["time/train/step_s"]
        found[f"{rate}_update"] = decisions / found["time/train/update_s"]
        return found


def prompts_of(items: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Items of a `PromptDataset` as prompts."""
    return [Prompt(item["sample_id"], item["row"], item) for item in items]
