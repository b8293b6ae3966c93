"""GRPO: generate groups of actions, reward them, and reinforce those better than their group.

`RewardTrainer` trains any policy in any environment with `GRPOStep`; `GRPOTrainer` trains language models, whose
actions are completions.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from verl_ext.data.dataset import SampleDataset, sampled_digest
from verl_ext.data.prompts import PromptBatch
from verl_ext.distributed import gather_results, local_world_size, on_every_rank, on_rank_zero, reduce_over_ranks
from verl_ext.errors import UserError
from verl_ext.grpo.guards import FLOAT32_GAP
from verl_ext.grpo.hf_engine import HFEngine
from verl_ext.grpo.metrics import sample_metrics, sample_rows, source_metrics, source_names, source_of
from verl_ext.grpo.protocols import Environment, Policy, Prompt, Trajectory
from verl_ext.grpo.rewards.text_environment import TextEnvironment
from verl_ext.grpo.sampling import RolloutEngine, SamplingArgs, sample_seed
from verl_ext.grpo.step import GRPOStep
from verl_ext.grpo.token_policy import ReferenceModel, TokenBatcher, TokenPolicy, forward_flops
from verl_ext.grpo.vllm_engine import VLLMRolloutEngine, WeightSync
from verl_ext.processes import quiet_stdout
from verl_ext.trainer.device import autocast, peak_memory
from verl_ext.trainer.fsdp import FSDPReshardPolicy
from verl_ext.trainer.fused_cross_entropy import TokenLoss
from verl_ext.trainer.model import build_model, disable_dropout, local_model_path, local_path
from verl_ext.trainer.packed_attention import attend_within_samples, enable_packing
from verl_ext.trainer.stages import GRPOConfig, RewardStageConfig
from verl_ext.trainer.tokenizer import rollout_stop_tokens, sync_eos_token, turn_end_tokens
from verl_ext.trainer.trainer import Metrics, PipelineTrainer


class RewardTrainer(PipelineTrainer):
    """Trains on a batch of prompts per step, with a group of actions for each prompt and one or more updates.

    A stage defines `build_environment`, `build_policy` and `max_decisions`.

    Attributes:
        environment: rewards actions.
        policy: the trained model; generates actions and evaluates them.
        step: generates, rewards and updates.
    """

    config: RewardStageConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.config
        self.environment = self.build_environment()
        with torch.random.fork_rng(devices=[]):  # building an engine must not change a resumed run's random numbers
            self.policy = self.build_policy()
        fsdp = config.model.fsdp_config
        self.reshard_policy = FSDPReshardPolicy.of_config(fsdp, self.model, self.precision, self.device_name)
        self.step = GRPOStep(
            self.policy,
            self.environment,
            config.algorithm,
            config.actor,
            group_size=config.rollout.n,
            num_mini_batches=config.num_mini_batches,
            micro_batch_size=config.data.micro_batch_size_per_gpu,
            max_decisions=self.max_decisions,
            num_ranks=dist.get_world_size(),
            optimizer_step=lambda loss: self.optimizer_step(loss)[1],
            skip_update=self.skip_update,
            timer=self.timer,
            device=self.device_name,
            before_micro_batch=self.before_micro_batch,
            is_interrupted=self.stop_vote.is_interrupted,
            wait=self.stop_vote.wait_unless_interrupted,
            replacement_prompts=self.replacement_prompts,
            before_update=self.before_update,
            max_engine_gap=self.max_engine_gap(),
            trace=self.trace,
        )

    # What a stage defines

    @abstractmethod
    def build_environment(self) -> Environment:
        """Build the environment, which rewards actions; collective."""

    @abstractmethod
    def build_policy(self) -> Policy:
        """Build the policy, which generates actions and evaluates them; collective."""

    @property
    @abstractmethod
    def max_decisions(self) -> int:
        """Maximum number of decisions in a sample, such as tokens of a completion."""

    # Building

    def build_collator(self) -> Callable[[list[dict[str, Any]]], PromptBatch]:
        return PromptBatch

    def max_engine_gap(self) -> float:
        """Return the largest accepted difference between log-probabilities of engine and trainer, in nats, by dtype."""
        trained = {parameter.dtype for parameter in self.model.parameters()}
        dtypes = {self.policy.engine_dtype, self.precision} | trained
        return FLOAT32_GAP if dtypes == {torch.float32} else self.config.health.limits.logprob_gap_alarm

    # The loop

    def fit(self) -> None:
        """Close the environment and the policy after training."""
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
        trajectories, metrics = self.step.run(prompts_of(batch.items), self.global_step)
        if self.logs_samples:
            self.log_samples("train", trajectories)
        return {
            **metrics,
            "train/lr(1e-3)": lr * 1e3,
            "train/epoch": self.epoch_of_step,
            "train/skipped_steps": self.guard.num_skipped,
            **self.with_step_costs(
                sample_metrics("train", trajectories, self.policy, self.environment, self.device_name),
                num_samples=len(trajectories),
            ),
        }

    @torch.no_grad()
    def validate(self) -> Metrics:
        """Reward greedy actions for the evaluation prompts; see `PipelineTrainer.validate`."""
        batches = self.eval_batches()
        if not batches:
            return {}
        start = time.perf_counter()
        trajectories: list[Trajectory] = []
        with self.policy.sampling(self.global_step):  # a stop inside the block frees the GPU for the save
            for prompts in batches:
                self.stop_vote.raise_if_stopping(self.checkpoint_manager.is_writing)
                batch_start = time.perf_counter()
                trajectories += self.step.rollout(prompts, self.global_step, group_size=1, greedy=True)
                # a batch may take longer than a step; before the first step, no deadline stops a run
                if self.stop_vote.longest_step_s:
                    self.stop_vote.note(step_s=time.perf_counter() - batch_start)
        self.step.reward_guard.report(f"evaluation at step {self.global_step}", trajectories)
        if self.config.trainer.log_samples_every:
            self.log_samples("eval", trajectories)
        parts = {f"time/eval/{name}_s": seconds for name, seconds in self.timer.pop().items()}
        parts["time/eval/step_s"] = time.perf_counter() - start
        metrics = sample_metrics("eval", trajectories, self.policy, self.environment, self.device_name)
        metrics |= source_metrics(trajectories, self.eval_sources, self.environment, self.device_name)
        metrics |= reduce_over_ranks(maxima=parts, device=self.device_name)
        decisions = metrics[f"eval/{self.policy.count_name}"]
        metrics[f"throughput/eval/{self.policy.rate_name}"] = decisions / metrics["time/eval/step_s"]
        return metrics

    def validation_step(self, batch: Any) -> torch.Tensor:
        """verl's method for a validation loss, which stages that learn from rewards do not have.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("a stage that learns from rewards has no validation loss; call validate()")

    def eval_batches(self) -> list[list[Prompt]]:
        """Return this rank's evaluation prompts in batches, as many on every rank; a batch may be empty."""
        dataset, count = self.eval_samples()
        size = self.config.data.train_batch_size
        return [
            prompts_of([dataset[row] for row in range(first + self.dp_rank, min(first + size, count), self.dp_size)])
            for first in range(0, count, size)
        ]

    def eval_samples(self) -> tuple[SampleDataset, int]:
        """Return the dataset of the evaluation prompts of all ranks, and their number: its first rows."""
        data = self.config.data
        dataset = self.val_dataset if data.eval_split == "test" else self.train_dataset
        if dataset is None or data.eval_every_steps == 0:
            return self.train_dataset, 0
        limit = len(dataset) if data.eval_batches < 0 else data.eval_batches * data.train_batch_size
        return dataset, min(limit, len(dataset))

    @property
    def eval_sources(self) -> Mapping[str, str]:
        """Names of the data sources that evaluations measure separately; see `source_names`."""
        return {}

    def replacement_prompts(self, round_number: int, numbers: Sequence[int]) -> Sequence[Prompt]:
        """Return prompts for a round of dynamic sampling, the same in a resumed run and on any number of ranks.

        Args:
            round_number: number of the round in the step, from 1.
            numbers: numbers of this rank's groups among all groups to replace, ascending.
        """
        seed = sample_seed(self.config.trainer.seed, self.global_step, "replacement prompts", 0)
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        # one whole batch per round, so that no prompt is used twice in a step
        size = self.config.data.train_batch_size
        fresh = [row for row in order if row not in self.rows_of_step][(round_number - 1) * size : round_number * size]
        return prompts_of([self.train_dataset[fresh[number]] for number in numbers if number < len(fresh)])

    @property
    def logs_samples(self) -> bool:
        """Whether samples of this training step are written."""
        interval = self.config.trainer.log_samples_every
        return bool(interval) and self.global_step % interval == 0

    def before_update(self, trajectories: Sequence[Trajectory]) -> None:
        """Use the trajectories of this rank while the model still has the weights that generated them; collective."""

    def log_samples(self, split: str, trajectories: Sequence[Trajectory]) -> None:
        """Write rank 0's first samples: `shown_in_training`, or `trainer.samples_per_table` evaluation prompts."""
        limit = self.config.trainer.samples_per_table
        shown = self.shown_in_training(trajectories) if split == "train" else trajectories[:limit]
        self.logger.log_samples(self.global_step, sample_rows(split, shown, self.policy, self.environment))

    def shown_in_training(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """Return the first groups that have at least `trainer.samples_per_table` samples together."""
        group_size = self.config.rollout.n
        num_groups = math.ceil(self.config.trainer.samples_per_table / group_size)
        return trajectories[: num_groups * group_size]

    def with_step_costs(self, metrics: Metrics, num_samples: int) -> Metrics:
        """Add a step's time and memory: seconds of the slowest rank, throughput of all ranks.

        Args:
            num_samples: samples of this rank in the step.
        """
        maxima = {**self.step_seconds(), **peak_memory(self.device_name)}
        costs = reduce_over_ranks(sums={"samples": num_samples}, maxima=maxima, device=self.device_name)
        costs["throughput/train/samples_per_s"] = costs.pop("samples") / costs["time/train/step_s"]
        decisions, rate = metrics[f"train/{self.policy.count_name}"], f"throughput/train/{self.policy.rate_name}"
        costs[rate] = decisions / costs["time/train/step_s"]
        costs[f"{rate}_update"] = decisions / costs["time/train/update_s"]
        return {**metrics, **costs}


class GRPOTrainer(RewardTrainer):
    """GRPO of a language model: vLLM or transformers generates completions, and the recipe's functions reward them."""

    config: GRPOConfig
    policy: TokenPolicy
    reference_digest = saved_reference_digest = ""
    """Identifies the model of a KL term, now and in the checkpoint to resume from; empty without one."""
    reference_adapter_digest = saved_reference_adapter_digest = ""
    """The same for the LoRA adapters of that model."""

    def build_model(self) -> PreTrainedModel:
        """Disable dropout, whose noise would change the ratios; exports also get the token that ends turns."""
        model, recorded = self.build_model_to_check()
        disable_dropout(model)
        sync_eos_token(model, self.tokenizer, turn_end_tokens(self.config.data, self.tokenizer), self.is_main)
        logits_of = TokenLoss(model.eval(), None, self.precision, self.device_name).logits
        max_length = self.config.data.max_prompt_length + self.config.data.max_response_length
        self.forward_check["why_not_packed"] = enable_packing(model, logits_of, self.precision, max_length, recorded)
        FSDPReshardPolicy(model, keeps_gathered=False).reshard()
        return model

    @property
    def packs(self) -> bool:
        """Whether samples can be packed into rows."""
        return self.forward_check["why_not_packed"] is None

    @cached_property
    def eval_sources(self) -> Mapping[str, str]:
        """Those of the evaluation prompts of all ranks."""
        dataset, count = self.eval_samples()
        return source_names(source_of(dataset[row]) for row in range(count))

    def build_environment(self) -> TextEnvironment:
        """Load the reward functions of the recipe on every rank.

        Raises:
            UserError: a function cannot be loaded, or the judge's isolation does not work here.
        """
        config, num_ranks_here = self.config, local_world_size()
        return on_every_rank(lambda: TextEnvironment(config.reward, config.data.max_response_length, num_ranks_here))

    def build_policy(self) -> TokenPolicy:
        """Build the policy of the model, its engine and its frozen reference.

        Raises:
            UserError: the engine cannot be built.
        """
        config, rollout = self.config, self.config.rollout
        # First, because vLLM patches classes of transformers for models that it does not implement itself.
        reference, engine = self.build_reference(), self.build_engine()
        engine.is_interrupted = self.stop_vote.is_interrupted
        return TokenPolicy(
            self.model,
            self.tokenizer,
            engine,
            TokenBatcher(
                self.tokenizer.pad_token_id,
                forward_flops(self.model) if config.actor.share_prompts else None,
                self.packs,
            ),
            SamplingArgs(rollout.temperature, rollout.top_p, rollout.top_k, config.data.max_response_length),
            seed=config.trainer.seed,
            autocast=self.autocast,
            device=self.device_name,
            entropy_gradient=config.actor.entropy_coeff != 0,
            reference=reference,
        )

    def build_engine(self) -> RolloutEngine:
        """Build the engine of `rollout.engine`; collective.

        Raises:
            UserError: vLLM cannot start. Only the failed rank raises it, and then exits: the engines of the other ranks
                may wait for this one, so they would not reach a collective.
        """
        rollout, data, path = self.config.rollout, self.config.data, local_model_path(self.config)
        ends = rollout_stop_tokens(self.config, self.tokenizer)
        if rollout.engine == "hf":
            pad_token_id = self.tokenizer.pad_token_id
            return HFEngine(self.model, pad_token_id, ends, rollout.max_num_seqs, self.autocast, self.device_name)
        with quiet_stdout():
            engine = VLLMRolloutEngine(
                rollout,
                path,
                max_model_len=data.max_prompt_length + data.max_response_length,
                end_tokens=ends,
                trust_remote_code=self.config.model.trust_remote_code,
            )
        bucket = rollout.bucket_bytes(on_cpu=self.device_name == "cpu")
        engine.weight_sync = WeightSync(self.model, engine.dtype, self.device_name, bucket)
        return engine

    def build_reference(self) -> ReferenceModel | None:
        """Build the frozen initial model for a KL term: this model without new adapters, or a copy; collective."""
        config, model = self.config, self.model
        if not config.actor.use_kl_loss:
            return None
        if config.model.uses_lora and config.model.lora_adapter_path is None:
            return lambda: without_adapters(model)
        self.require_same_reference()
        frozen = build_model(config, self.device_mesh, self.precision).eval()
        frozen.requires_grad_(False)
        if self.packs:
            attend_within_samples(frozen)
        return lambda: nullcontext(frozen)

    def require_same_reference(self) -> None:
        """Refuse to resume with another reference; records digests of its files in checkpoints; collective.

        Raises:
            UserError: the files of `model.partial_pretrain` or `model.lora_adapter_path` differ from those of the run's
                first start.
        """
        model, path = self.config.model, Path(local_model_path(self.config))
        self.reference_digest = _digest_of_model(path / "config.json", path.glob("*.safetensors"))
        _require_same_digest(
            f"model.partial_pretrain={model.partial_pretrain}", self.saved_reference_digest, self.reference_digest
        )
        if model.lora_adapter_path is None:
            return
        path = Path(local_path(model.lora_adapter_path, model.use_shm))
        self.reference_adapter_digest = _digest_of_model(path / "adapter_config.json", path.glob("adapter_model.*"))
        _require_same_digest(
            f"model.lora_adapter_path={model.lora_adapter_path}",
            self.saved_reference_adapter_digest,
            self.reference_adapter_digest,
        )

    def data_state(self) -> dict[str, Any]:
        digests = {
            "reference_digest": self.reference_digest,
            "reference_adapter_digest": self.reference_adapter_digest,
        }
        return {**super().data_state(), **digests}

    def load_data_state(self, state: dict[str, Any]) -> None:
        super().load_data_state(state)
        self.saved_reference_digest = state.get("reference_digest", "")  # missing: a checkpoint of SFT or of verl
        self.saved_reference_adapter_digest = state.get("reference_adapter_digest", "")

    def before_update(self, trajectories: Sequence[Trajectory]) -> None:
        """Write the tokens of the samples that `log_samples` writes."""
        trainer = self.config.trainer
        if trainer.log_sample_tokens and self.logs_samples:
            rows = self.policy.token_rows(
                self.shown_in_training(trajectories), self.config.data.micro_batch_size_per_gpu
            )
            self.logger.log_sample_tokens(self.global_step, rows)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context of a forward pass."""
        return autocast(self.precision, self.device_name)

    @property
    def max_decisions(self) -> int:
        return self.config.data.max_response_length


def _digest_of_model(config: Path, weights: Iterable[Path]) -> str:
    """Digest of the files of a model or of adapters; empty for a Hub name, which has none here; collective."""
    files = [config, *sorted(weights)]
    return on_rank_zero(lambda: sampled_digest(files) if config.is_file() else "")


def _require_same_digest(key: str, saved: str, own: str) -> None:
    if saved and own not in ("", saved):
        raise UserError(
            f"{key} differs from the reference model that this run has used so far; restore the original model, or set "
            "another trainer.experiment_name"
        )


@contextmanager
def without_adapters(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Return a context in which a model with LoRA adapters computes without them.

    peft's `disable_adapter` also changes `requires_grad`, but FSDP2 reads that of sharded parameters, and outside a
    forward pass either the sharded or the gathered ones may be registered.
    """
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield model
    finally:
        for layer in layers:
            layer._disable_adapters = False


def prompts_of(items: Sequence[dict[str, Any]]) -> list[Prompt]:
    """Convert items of a `PromptDataset` to prompts."""
    return [Prompt(item["sample_id"], item["row"], item) for item in items]
