"""GRPO: generate groups of actions, reward them, and learn from those better than their group.

`RewardTrainer` is the step, whatever an action is; `GRPOTrainer` is that of language models, whose actions are tokens.
"""

from __future__ import annotations

import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, PreTrainedModel

from verl_ext.data.chat_template import stop_token_ids
from verl_ext.data.prompts import PromptBatch
from verl_ext.distributed import gather_results, on_every_rank, reduce_over_ranks
from verl_ext.grpo.config import RolloutConfig
from verl_ext.grpo.environment import Environment, Reward
from verl_ext.grpo.experience import Collector, Experience, Replacement
from verl_ext.grpo.guards import FLOAT32_GAP, EngineGuard, RewardGuard
from verl_ext.grpo.metrics import GRPOMetrics
from verl_ext.grpo.policy import LogProbs, Policy, Prompt, Sample
from verl_ext.grpo.rewards.environment import TextEnvironment
from verl_ext.grpo.rollout.completion import Sampling
from verl_ext.grpo.rollout.engine import RolloutEngine, WeightKeeper
from verl_ext.grpo.rollout.hf_engine import HfRollout
from verl_ext.grpo.rollout.vllm_engine import VllmRollout
from verl_ext.grpo.rollout.weights import WeightSource
from verl_ext.grpo.tokens.layout import Layout
from verl_ext.grpo.tokens.model import forward_cost
from verl_ext.grpo.tokens.policy import TokenModel, TokenPolicy
from verl_ext.grpo.update import Updater, UpdateSettings
from verl_ext.processes import quiet_stdout
from verl_ext.trainer.device import autocast, peak_memory
from verl_ext.trainer.fsdp import FSDPReshardPolicy, keeps_gathered
from verl_ext.trainer.model import build_model, disable_dropout, local_model_path
from verl_ext.trainer.stages import GRPOConfig, RewardStageConfig
from verl_ext.trainer.trainer import Metrics, PipelineTrainer

MB = 1 << 20
CPU_BUCKET_MB = 4
"""Buckets that fit a processor's cache are gathered in two thirds of the time of larger ones."""


class RewardTrainer(PipelineTrainer):
    """One step is a batch of prompts, a group of actions for each, and one or more updates from them.

    A stage defines `build_environment`, `build_policy`, `build_reshard_policy` and `max_decisions`.

    Attributes:
        environment: rewards actions.
        policy: generates actions and evaluates them; the model that is trained.
    """

    config: RewardStageConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See `PipelineTrainer`."""
        super().__init__(*args, **kwargs)
        data, algorithm = self.config.data, self.config.algorithm
        self.environment = self.build_environment()
        with torch.random.fork_rng(devices=[]):  # building an engine must not change a resumed run's random numbers
            self.policy = self.build_policy()
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
            self.update_settings(),
            dist.get_world_size(),
            lambda loss: self.optimizer_step(loss)[1],
            self.timer,
            self.device_name,
            self.build_reshard_policy().before_micro_batch,
        )
        self.metrics = GRPOMetrics(self.policy, self.environment, self.device_name)
        self.reward_guard = RewardGuard(self.environment.names, self.metrics.describe, self.device_name)
        self.engine_guard = EngineGuard(
            self.policy, self.max_engine_gap(), data.micro_batch_size_per_gpu, self.device_name
        )
        rounds = algorithm.dynamic_sampling.max_rounds
        self.replacement = Replacement(rounds, self.replacement_prompts) if rounds else None

    # What a stage defines

    @abstractmethod
    def build_environment(self) -> Environment:
        """What rewards actions; collective."""

    @abstractmethod
    def build_policy(self) -> Policy:
        """What generates actions; collective."""

    @abstractmethod
    def build_reshard_policy(self) -> FSDPReshardPolicy:
        """What stays gathered between the micro-batches of an update."""

    @property
    @abstractmethod
    def max_decisions(self) -> int:
        """Most decisions of a sample, such as tokens of a completion."""

    def rollout_correction(self) -> tuple[str, float] | None:
        """Level and threshold of truncated importance sampling; None if the policy generates exactly."""
        return None

    # Building

    def build_collator(self) -> Callable[[list[dict[str, Any]]], PromptBatch]:
        """See `PipelineTrainer.build_collator`."""
        return PromptBatch

    @property
    def updates_per_step(self) -> int:
        """See `PipelineTrainer.updates_per_step`."""
        return self.update_settings().num_updates

    def update_settings(self) -> UpdateSettings:
        """How a step's samples are divided into updates."""
        actor, data = self.config.actor, self.config.data
        return UpdateSettings(
            actor=actor,
            num_mini_batches=data.train_batch_size // (actor.ppo_mini_batch_size or data.train_batch_size),
            num_epochs=actor.ppo_epochs,
            micro_batch_size=data.micro_batch_size_per_gpu,
            max_decisions=self.max_decisions,
            correction=self.rollout_correction(),
        )

    def max_engine_gap(self) -> float:
        """Largest accepted difference between log-probabilities of engine and trainer in their number types, in nat."""
        trained = {parameter.dtype for parameter in self.model.parameters()}
        dtypes = {self.policy.engine_dtype, self.precision} | trained
        return FLOAT32_GAP if dtypes == {torch.float32} else self.config.health.limits.logprob_gap_alarm

    # The loop

    def fit(self) -> None:
        """See `PipelineTrainer.fit`; closes the environment and the policy."""
        try:
            super().fit()
        finally:
            try:
                self.environment.close()
            finally:
                self.policy.close()

    def training_step(self, batch: PromptBatch) -> Metrics:
        """Generate, reward, compute advantages and update; see `PipelineTrainer.training_step`."""
        lr = self.lr_scheduler.get_last_lr()[0]
        self.model.train()
        self.rows_of_step = {row for rows in gather_results(lambda: batch.rows) for row in rows}
        with self.policy.drawing(self.global_step - 1) as weights:
            experience = self.collector.collect(prompts_of(batch.items), self.global_step, self.replacement)
            compared = self.engine_guard.draw(self.global_step, experience.samples)
        self.reward_guard.check(self.global_step, experience.samples, experience.rewards)
        self.engine_guard.check(self.global_step, compared)
        self.log_samples(experience)
        start = time.perf_counter()
        updated = self.updater.update(experience)
        self.trace_update(experience.samples, start)
        return {
            **self.metrics.of_update(experience, updated),
            "train/lr(1e-3)": lr * 1e3,
            "train/epoch": self.global_step / self.steps_per_epoch,
            "train/skipped_steps": self.guard.num_skipped,
            **weights,
            **({"weights/version": float(self.global_step - 1)} if weights else {}),
            **self.with_step_costs(self.metrics.of_samples("train", experience.samples, experience.rewards)),
        }

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Rewards of greedy actions for the evaluation prompts."""
        batches = self.eval_prompts()
        if not batches:
            return {}
        start = time.perf_counter()
        samples: list[Sample] = []
        rewards: list[Reward] = []
        with self.policy.drawing(self.global_step):  # a stop inside frees the GPU for the save
            for prompts in batches:
                self.stop_vote.check()
                batch_start = time.perf_counter()
                more_samples, more_rewards = self.collector.rewarded(prompts, self.global_step, 1, greedy=True)
                if self.stop_vote.longest_step_s:  # a batch can take longer; none stops a run before its first step
                    self.stop_vote.note(step_s=time.perf_counter() - batch_start)
                samples += more_samples
                rewards += more_rewards
        self.reward_guard.report(f"measurement at step {self.global_step}", samples, rewards)
        parts = {f"time/eval/{name}_s": seconds for name, seconds in self.timer.pop().items()}
        parts["time/eval/step_s"] = time.perf_counter() - start
        found = self.metrics.of_samples("eval", samples, rewards)
        found |= reduce_over_ranks(maxima=parts, device=self.device_name)
        decisions = found[f"eval/{self.policy.count_name}"]
        found[f"throughput/eval/{self.policy.rate_name}"] = decisions / found["time/eval/step_s"]
        return found

    def validation_step(self, batch: Any) -> torch.Tensor:
        """verl's method for a validation loss, which a stage that learns from rewards does not have.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a stage that learns from rewards has no validation loss; call validate()")

    def eval_prompts(self) -> list[list[Prompt]]:
        """This rank's evaluation prompts in batches, as many on every rank; a batch can be empty."""
        data = self.config.data
        dataset = self.val_dataset if data.eval_split == "test" else self.train_dataset
        if dataset is None or data.eval_every_steps == 0:
            return []
        size = data.train_batch_size
        count = len(dataset) if data.eval_batches < 0 else min(data.eval_batches * size, len(dataset))
        return [
            prompts_of([dataset[row] for row in range(first + self.dp_rank, min(first + size, count), self.dp_size)])
            for first in range(0, count, size)
        ]

    def replacement_prompts(self, number: int, count: int) -> Sequence[Prompt]:
        """Prompts for a round of dynamic sampling: different on each rank, and the same in a resumed run.

        Args:
            number: of the round in the step, from 1.
            count: most prompts for this rank.
        """
        seed = hash((self.config.trainer.seed, self.global_step)) % (1 << 31)
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        # whole batches, one for each round, so that no prompt is used twice in a step
        size = self.config.data.train_batch_size
        fresh = [row for row in order if row not in self.rows_of_step][(number - 1) * size : number * size]
        return prompts_of([self.train_dataset[row] for row in fresh[self.dp_rank :: self.dp_size][:count]])

    def trace_update(self, samples: Sequence[Sample], start: float) -> None:
        """Record the update as the last part of each sample's life."""
        if self.trace is not None:
            for sample in samples:
                identity = f"{self.global_step}/{sample.prompt.sample_id}/{sample.number}"
                self.trace.async_span(identity, "update", start, time.perf_counter())

    def log_samples(self, experience: Experience) -> None:
        """Write some of rank 0's samples, every `trainer.log_samples_every` steps."""
        trainer = self.config.trainer
        if trainer.log_samples_every and self.global_step % trainer.log_samples_every == 0:
            self.logger.log_samples(self.global_step, self.metrics.rows(experience, trainer.samples_per_table))

    def with_step_costs(self, metrics: Metrics) -> Metrics:
        """Add a step's time and memory: seconds of the slowest rank, throughput of all ranks."""
        parts = {f"time/train/{part}_s": value for part, value in self.timer.pop().items()}
        parts["time/train/step_s"] = time.perf_counter() - self.step_start
        maxima = {**parts, **peak_memory(self.device_name)}
        found = {**metrics, **reduce_over_ranks(maxima=maxima, device=self.device_name)}
        decisions, rate = found[f"train/{self.policy.count_name}"], f"throughput/train/{self.policy.rate_name}"
        found[rate] = decisions / found["time/train/step_s"]
        found[f"{rate}_update"] = decisions / found["time/train/update_s"]
        return found


class GRPOTrainer(RewardTrainer):
    """GRPO of a language model: completions by vLLM or transformers, rewarded by the recipe's functions."""

    config: GRPOConfig

    def build_model(self) -> PreTrainedModel:
        """See `PipelineTrainer.build_model`; without dropout, whose noise would appear in the ratios."""
        model = super().build_model()
        disable_dropout(model)
        return model

    def build_environment(self) -> TextEnvironment:
        """See `RewardTrainer.build_environment`: the reward functions of the recipe, on every rank.

        Raises:
            UserError: a function cannot be loaded, or the judge's isolation does not work here.
        """
        config, num_ranks_here = self.config, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return on_every_rank(lambda: TextEnvironment(config.reward, config.data.max_response_length, num_ranks_here))

    def build_policy(self) -> TokenPolicy:
        """See `RewardTrainer.build_policy`: the model with its engine and its frozen reference.

        Raises:
            UserError: the engine cannot be built.
        """
        config, rollout = self.config, self.config.rollout
        # First, because building vLLM changes classes of transformers if vLLM does not implement the model itself.
        reference = self.build_reference()
        engine = self.build_engine()
        source = None
        if isinstance(engine, WeightKeeper):
            source = WeightSource(self.model, engine.dtype, self.device_name, bucket_bytes(rollout, self.device_name))
        return TokenPolicy(
            TokenModel(
                self.model,
                reference,
                self.autocast,
                self.device_name,
                config.actor.entropy_coeff != 0,
                Layout(self.tokenizer.pad_token_id, forward_cost(self.model) if config.actor.share_prompts else None),
            ),
            self.tokenizer,
            engine,
            source,
            Sampling(rollout.temperature, rollout.top_p, rollout.top_k, config.data.max_response_length),
            config.trainer.seed,
        )

    def build_engine(self) -> RolloutEngine:
        """The engine of `rollout.engine`; collective."""
        rollout, data, path = self.config.rollout, self.config.data, local_model_path(self.config)
        ends = stop_token_ids(generation_settings(path), self.tokenizer)
        if rollout.engine == "hf":
            pad_token_id = self.tokenizer.pad_token_id
            return HfRollout(self.model, pad_token_id, ends, rollout.max_num_seqs, self.autocast, self.device_name)
        with quiet_stdout():
            return on_every_rank(
                lambda: VllmRollout(
                    rollout,
                    path,
                    max_model_len=data.max_prompt_length + data.max_response_length,
                    end_tokens=ends,
                    trust_remote_code=self.config.model.trust_remote_code,
                )
            )

    def build_reference(self) -> Callable[[Callable[[PreTrainedModel], LogProbs]], LogProbs]:
        """Calls a function with the frozen model: this one without its new adapters, or another one; collective."""
        config, model = self.config, self.model
        if not config.actor.use_kl_loss:
            return lambda evaluate: evaluate(model)
        if config.model.uses_lora and config.model.lora_adapter_path is None:

            def without_adapters(evaluate: Callable[[PreTrainedModel], LogProbs]) -> LogProbs:
                with model.disable_adapter():
                    return evaluate(model)

            return without_adapters
        frozen = build_model(config, self.device_mesh, self.precision).eval()
        frozen.requires_grad_(False)
        return lambda evaluate: evaluate(frozen)

    def build_reshard_policy(self) -> FSDPReshardPolicy:
        """See `RewardTrainer.build_reshard_policy`."""
        model: Any = self.model
        keeps = keeps_gathered(self.config.model.fsdp_config, model, self.precision, self.device_name)
        return FSDPReshardPolicy(model, keeps)

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of a forward pass."""
        return autocast(self.precision, self.device_name)

    @property
    def max_decisions(self) -> int:
        """See `RewardTrainer.max_decisions`."""
        return self.config.data.max_response_length

    def rollout_correction(self) -> tuple[str, float] | None:
        """See `RewardTrainer.rollout_correction`."""
        correction = self.config.algorithm.rollout_correction
        return (correction.rollout_is, correction.rollout_is_threshold) if correction.rollout_is else None


def prompts_of(items: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Items of a `PromptDataset` as prompts."""
    return [Prompt(item["sample_id"], item["row"], item) for item in items]


def bucket_bytes(rollout: RolloutConfig, device_name: str) -> int:
    """Most bytes of weights in transit to the engine at a time."""
    megabytes = rollout.update_weights_bucket_megabytes
    return (min(megabytes, CPU_BUCKET_MB) if device_name == "cpu" else megabytes) * MB


def generation_settings(path: str) -> GenerationConfig | None:
    """The generation settings in a model's directory, if any."""
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None
