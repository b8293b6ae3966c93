"""GRPO whose policy is the budget controller, and whose environment is a frozen vision-language model."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from verl_ext.console import print_line, warn
from verl_ext.controller.block_importance import cheapest
from verl_ext.controller.calibration import doubts, other_machine
from verl_ext.controller.environment import ModelEnvironment
from verl_ext.controller.latency_source import ModelledLatency
from verl_ext.controller.policy import ControllerPolicy
from verl_ext.controller.scoring.scorer import AnswerScorer
from verl_ext.data.image_questions import ImageQuestionDataset
from verl_ext.data.prompts import PromptBatch
from verl_ext.distributed import on_every_rank, on_rank_zero, reduce_over_ranks
from verl_ext.metrics.epoch_history import EpochSums
from verl_ext.trainer.budget_parts import (
    budgets_of,
    check_budgets,
    importance_of,
    latency_source,
    make_controller,
    make_executor,
)
from verl_ext.trainer.controller_files import BEST_MODEL, epoch_file, whole_weights, write_controllers
from verl_ext.trainer.gathering import Gathering
from verl_ext.trainer.grpo import GRPOTrainer
from verl_ext.trainer.loop import Metrics
from verl_ext.trainer.model import shard
from verl_ext.trainer.optimizer import build_optimizer
from verl_ext.trainer.plateau import PlateauSchedule
from verl_ext.trainer.stages import BudgetConfig

CHECKED_QUESTIONS = 8
"""On how many the least budget is tried out."""


class BudgetControllerTrainer(GRPOTrainer):
    """One step is a batch of questions, a budget and a group of configurations for each, and an update from them."""

    config: BudgetConfig
    train_dataset: ImageQuestionDataset
    val_dataset: ImageQuestionDataset
    environment: ModelEnvironment
    lr_scheduler: PlateauSchedule

    def _build_model_optimizer(self) -> None:
        config = self.config
        self.executor = on_every_rank(lambda: make_executor(config))
        questions = self.train_dataset.samples
        self.latency = latency_source(config, self.executor, questions)
        self.budgets_ms = budgets_of(config, self.executor, questions, self.latency)
        controller = on_every_rank(lambda: make_controller(config, self.executor, questions[0], self.budgets_ms))
        self.model = self.fsdp_model = shard(controller, config, self.device_mesh, self.device_name)
        self.model_config = controller.config
        self.optimizer = build_optimizer(self.fsdp_model, config.optim)
        self.lr_scheduler = PlateauSchedule(self.optimizer, config.optim.plateau_factor, config.optim.plateau_patience)
        self.epoch_sums, self.best_reward = EpochSums(), float("-inf")

    def make_environment(self) -> ModelEnvironment:
        """What rewards: the model under each configuration, once some of them were seen to keep the budgets."""
        config, space, questions = self.config, self.model_config.space, self.train_dataset.samples
        if isinstance(self.latency, ModelledLatency):
            r2 = self.latency.model.r2
            on_rank_zero(lambda: print_line(f"latency model: R squared {r2:.3f} on what was not fitted{doubts(r2)}"))
            if self.is_main and (doubt := other_machine(self.latency.model, self.executor.adapter)) is not None:
                warn(doubt)
        checked = questions[:CHECKED_QUESTIONS]
        least = cheapest(space, importance_of(config, self.executor.adapter))
        low_ms = self.budgets_ms[0]
        on_every_rank(lambda: check_budgets(config, low_ms, self.executor, least, checked, self.latency))
        scorer = AnswerScorer([*questions, *self.val_dataset.samples])
        return ModelEnvironment(self.executor, space, config.reward, scorer, self.latency)

    def make_policy(self) -> ControllerPolicy:
        """What is trained: the controller."""
        weight, seed = self.config.actor.tier_entropy_weight, self.config.trainer.seed
        return ControllerPolicy(self.fsdp_model, self.executor, self.budgets_ms, seed, self.device_name, weight)

    def make_gathering(self) -> Gathering:
        """See `GRPOTrainer`; the controller is so small that it does not matter."""
        return Gathering(self.fsdp_model, keeps=False)

    def rollout_correction(self) -> None:
        """See `GRPOTrainer`; what draws is what is trained."""

    @property
    def max_decisions(self) -> int:
        """See `GRPOTrainer`; a configuration is one decision."""
        return 1

    def training_step(self, batch: PromptBatch) -> Metrics:
        """See `PipelineTrainer.training_step`."""
        asked, found = self.executor.outcomes.num_asked, self.executor.outcomes.num_found
        metrics = super().training_step(batch)
        new = {"asked": self.executor.outcomes.num_asked - asked, "found": self.executor.outcomes.num_found - found}
        counts = reduce_over_ranks(sums=new, device=self.device_name)
        metrics["train/loss"] = metrics["train/policy_gradient_loss"]
        metrics["throughput/train/cache_hit_rate"] = counts["found"] / max(counts["asked"], 1.0)
        self.epoch_sums.add(int(metrics["train/num_configs"]), of_kind(metrics, "train"), metrics["train/loss"])
        return metrics

    def validate(self) -> Metrics:
        """See `GRPOTrainer.validate`."""
        with self.environment.measuring(self.config.latency.validation == "measured"):
            return super().validate()

    # An epoch

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether the current step was an epoch's last."""
        return self.global_step > 0 and self.global_step % self.steps_per_epoch == 0

    def is_due(self, frequency: int) -> bool:
        """See `PipelineTrainer.is_due`; an epoch ends with a measurement and a checkpoint whatever the frequency is."""
        return super().is_due(frequency) or self.is_at_end_of_epoch

    def run_validation(self) -> None:
        """Measure; at the end of an epoch the learning rate, the tables and the files of that epoch follow."""
        super().run_validation()
        if self.is_at_end_of_epoch:
            self.end_epoch(self.global_step // self.steps_per_epoch)

    def end_epoch(self, epoch: int) -> None:
        """Tell what the epoch brought, and write its weights; collective."""
        measured = EpochSums()
        measured.add(1, of_kind(self.step_metrics, "eval"))
        rows = {"Train": self.epoch_sums.row(epoch), "Val": measured.row(epoch)}
        reward = rows["Val"]["reward_mean"]
        self.lr_scheduler.step(reward)
        is_best, self.best_reward = reward > self.best_reward, max(reward, self.best_reward)
        self.epoch_sums = EpochSums()
        for kind, row in rows.items():
            self.attempt.log_epoch(kind, row)
        weights = whole_weights(self.fsdp_model)
        about = {"epoch": epoch, "val_reward": reward, "config": self.model_config.to_dict()}
        names = [epoch_file(epoch), *([BEST_MODEL] if is_best else [])]
        on_rank_zero(lambda: write_controllers([self.run_dir / name for name in names], weights, about))

    def data_state(self) -> dict[str, Any]:
        """See `TrainerSetup.data_state`."""
        return {**super().data_state(), "epoch_sums": asdict(self.epoch_sums), "best_reward": self.best_reward}

    def load_data_state(self, state: dict[str, Any]) -> None:
        """See `TrainerSetup.load_data_state`."""
        super().load_data_state(state)
        self.epoch_sums = EpochSums(**state["epoch_sums"])
        self.best_reward = state["best_reward"]


def of_kind(metrics: Metrics, kind: str) -> dict[str, float]:
    """What `EpochSums.add` takes, of the metrics of a step or a measurement."""
    names = {"reward": "reward_total", "accuracy": "accuracy", "latency": "latency_ms"}
    found = {
        f"{quantity}_{figure}": metrics[f"{kind}/{name}_{figure}"]
        for quantity, name in names.items()
        for figure in ("mean", "std")
    }
    return {**found, "budget_violation_rate": metrics[f"{kind}/budget_violation_mean"]}
