"""GRPO with the budget controller as policy and a frozen vision-language model as environment."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from verl_ext.checkpoint.save import FileWriter
from verl_ext.console import print_line, warn
from verl_ext.controller.execution import VLMRunner
from verl_ext.controller.grpo import ControllerEnvironment, ControllerPolicy
from verl_ext.controller.importance import load_importance
from verl_ext.controller.latency import (
    LATENCY_FILE,
    NUM_CHECKED_QUESTIONS,
    LatencySource,
    MeasuredLatency,
    ModeledLatency,
    calibrate,
    measure_deciding_ms,
    require_reachable,
    warn_of_bad_fit,
    warn_of_other_machine,
)
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.scoring import AnswerScorer
from verl_ext.controller.space import ConfigurationSpace, cheapest_configuration
from verl_ext.controller.vlm import PRECISIONS, STATE_KEY, ControlledModel, fingerprint, load_weights
from verl_ext.data.image_questions import ImageQuestionDataset, require_no_placeholders
from verl_ext.data.prompts import PromptBatch
from verl_ext.distributed import on_every_rank, on_rank_zero, reduce_over_ranks, to_full
from verl_ext.errors import UserError
from verl_ext.files import replacing, write_errors
from verl_ext.hardware import pick_precision
from verl_ext.metrics.csv_tables import EpochSums
from verl_ext.plugins import Plugin
from verl_ext.trainer.fsdp import shard
from verl_ext.trainer.grpo import RewardTrainer
from verl_ext.trainer.model import local_model_path
from verl_ext.trainer.optimizer import PlateauScheduler
from verl_ext.trainer.stages import BudgetConfig
from verl_ext.trainer.trainer import Metrics

NUM_MEASURED_QUESTIONS = 32
"""Number of questions for fitting a latency model."""
BEST_MODEL = "best_model.pt"


class BudgetTrainer(RewardTrainer):
    """Trains on a batch of questions per step, with a budget and a group of configurations for each question."""

    config: BudgetConfig
    train_dataset: ImageQuestionDataset
    val_dataset: ImageQuestionDataset
    environment: ControllerEnvironment
    lr_scheduler: PlateauScheduler

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.epoch_sums, self.best_reward = EpochSums(), float("-inf")  # `load_position` restores them
        self.saved_reward_terms: dict[str, Any] | None = None
        self.saved_fingerprint: str | None = None
        self.saved_dtype = "auto"
        super().__init__(*args, **kwargs)

    # The controller and the model that it controls

    def build_model(self) -> PreTrainedModel:
        """Build the controller, and the frozen model that it controls."""
        self.runner = on_every_rank(self.build_runner)
        self.latency = self.build_latency_source()
        self.budgets_ms = self.build_budgets()
        controller = on_every_rank(self.build_controller)
        return shard(controller, self.config.model.fsdp_config, self.device_mesh, self.precision)

    def controlled_model(self) -> ControlledModel:
        """Return the description of the vision-language model."""
        config, controller = self.config, self.config.controller
        return ControlledModel(
            local_model_path(config),
            tuple(controller.tier_sizes),
            controller.max_new_tokens,
            config.data.question_suffix,
            config.model.trust_remote_code,
            num_threads=torch.get_num_threads() if config.trainer.device == "cpu" else None,
            adapter=config.model.adapter,
        )

    def build_runner(self) -> VLMRunner:
        """Build the frozen model, unsharded on every rank.

        Raises:
            UserError: the model cannot be loaded, the checkpoint to resume from was trained for another one, or a
                question contains its token of an image.
        """
        config, controller = self.config, self.config.controller
        device, named = config.trainer.device, config.model.adapter
        # the fingerprint depends on the dtype, so auto must not change it on another device
        dtype = pick_precision(self.saved_dtype if controller.dtype == "auto" else controller.dtype, device)
        self.vlm_dtype = PRECISIONS[dtype]
        plugin = None if named is None else Plugin.parse(named, "model.adapter")
        runner = self.controlled_model().runner(
            device,
            dtype,
            plugin,
            max_encodings=controller.max_encodings,
            warms_up="measured" in (config.latency.source, config.latency.validation),
        )
        self.vlm_fingerprint = fingerprint(runner.adapter.model)
        saved = self.saved_fingerprint  # None: it starts at step 0, or an earlier version wrote the checkpoint
        if saved not in (None, self.vlm_fingerprint):
            assert self.checkpoint is not None
            previous = "auto depends on the device" if self.saved_dtype == "auto" else self.saved_dtype
            raise UserError(
                f"{self.checkpoint} was trained for another vision-language model or dtype than "
                f"{config.model.partial_pretrain}; restore its model, set controller.dtype to the previous dtype "
                f"({previous}), or set trainer.experiment_name to a new name to start "
                f"{self.weights_of(self.checkpoint)}"
            )
        samples = [*self.train_dataset.samples, *self.val_dataset.samples]
        require_no_placeholders(samples, runner.adapter.processor)
        return runner

    @property
    def space(self) -> ConfigurationSpace:
        """The configurations that the controller can choose."""
        section = self.config.controller
        return self.runner.adapter.space(section.min_active, section.max_active, list(section.topk_choices))

    @cached_property
    def block_scores(self) -> Mapping[int, float] | None:
        """Importance of the model's blocks from `controller.importance_file`; None without one."""
        file = self.config.controller.importance_file
        return None if file is None else load_importance(file, self.runner.adapter)

    def build_controller(self) -> BudgetController:
        """Build a controller for the model, with new weights or those of `controller.init_from`."""
        section = self.config.controller
        vision, language = self.runner.features(self.train_dataset.samples[0])  # any question gives the widths
        named = Path(str(self.config.model.partial_pretrain)).expanduser()
        path = str(named.resolve() if named.is_dir() else named)  # the export may be used in any working directory
        low_ms, high_ms = self.budgets_ms
        controller = BudgetController(
            BudgetControllerConfig(
                **vars(self.space),
                vision_width=len(vision),
                language_width=len(language),
                low_ms=low_ms,
                high_ms=high_ms,
                hidden=section.hidden,
                dropout=section.dropout,
                vlm={
                    **self.controlled_model().to_dict(),
                    "path": path,
                    "fingerprint": self.vlm_fingerprint,
                    "dtype": self.vlm_dtype,
                },
            )
        )
        if self.block_scores is not None:
            controller.init_block_bias(self.block_scores)
        if section.init_from is not None:
            load_weights(controller, Path(section.init_from).expanduser())
        return controller

    # Latency and budgets

    def build_latency_source(self) -> LatencySource:
        """Build measured latency or a latency model, which rank 0 fits if it is missing; collective."""
        if self.config.latency.source == "measured":
            sample = self.train_dataset.samples[:NUM_MEASURED_QUESTIONS]
            return MeasuredLatency(measure_deciding_ms(self.runner, self.space, sample, self.config.controller.hidden))
        on_rank_zero(self.modeled_latency)  # the other ranks read its file
        return on_every_rank(self.modeled_latency)

    def modeled_latency(self) -> ModeledLatency:
        """Load the latency model of `latency.file` or of the run; fit the latter if it is missing.

        Raises:
            UserError: the latency model was fitted on another model.
        """
        latency, controller, adapter = self.config.latency, self.config.controller, self.runner.adapter
        path = self.run_dir / LATENCY_FILE if latency.file is None else Path(latency.file).expanduser()
        if latency.file is None and not path.is_file():
            sizes = latency.configurations, latency.repeats, controller.max_new_tokens, controller.hidden
            calibrate(adapter, self.space, self.train_dataset.samples[:NUM_MEASURED_QUESTIONS], *sizes).save(path)
        return ModeledLatency.load(path, adapter, latency.percentile)

    def build_budgets(self) -> tuple[float, float]:
        """Return lowest and highest budget in ms, as configured or as fractions of the full configuration's latency."""
        section, questions = self.config.controller, self.train_dataset.samples[:NUM_MEASURED_QUESTIONS]
        if section.budgets_of_full is None:
            low_ms, high_ms = section.budgets_ms
            return low_ms, high_ms
        full = self.space.full
        full_ms = statistics.fmean(self.latency.run_ms(self.runner.run(each, full)) for each in questions)
        low_ms, high_ms = (share * full_ms for share in section.budgets_of_full)
        return low_ms, high_ms

    def require_reachable_budgets(self) -> None:
        """Refuse budgets that no configuration can meet.

        Raises:
            UserError: for most questions, the cheapest configuration and its decision exceed the lowest budget.
        """
        cheapest = cheapest_configuration(self.space, self.block_scores)
        questions = self.train_dataset.samples[:NUM_CHECKED_QUESTIONS]
        self.runner.run(questions[0], cheapest)  # the first run includes the warm-up
        # as in the reward: at the lowest tier, decision and answer share the image encoding
        taken_ms = [
            self.latency.run_ms(self.runner.run_uncached(each, cheapest)) + self.latency.deciding_ms
            for each in questions
        ]
        (low_ms, _), shares = self.budgets_ms, self.config.controller.budgets_of_full
        if shares is None:
            require_reachable("controller.budgets_ms", low_ms, taken_ms)
        else:
            require_reachable("controller.budgets_of_full", low_ms, taken_ms, full_ms=low_ms / shares[0])

    # Building

    def build_scheduler(self) -> LRScheduler:
        """Build a scheduler that lowers the rate when the validation reward stops rising."""
        return PlateauScheduler(self.optimizer, self.config.optim.plateau_factor, self.config.optim.plateau_patience)

    def build_environment(self) -> ControllerEnvironment:
        """Build the environment around the frozen model, if its cheapest configuration meets the budgets."""
        if isinstance(self.latency, ModeledLatency):
            if self.is_main:
                model, file = self.latency.model, self.config.latency.file
                print_line(f"latency model: R squared {model.r2:.3f} on held-out runs")
                warn_of_bad_fit(model, self.run_dir / LATENCY_FILE if file is None else Path(file))
                warn_of_other_machine(model, self.runner.adapter)
        on_every_rank(self.require_reachable_budgets)
        scorer = AnswerScorer([*self.train_dataset.samples, *self.val_dataset.samples])
        return ControllerEnvironment(self.runner, self.space, self.config.reward, scorer, self.latency)

    def build_policy(self) -> ControllerPolicy:
        weight, seed = self.config.actor.tier_entropy_weight, self.config.trainer.seed
        return ControllerPolicy(self.model, self.runner, self.budgets_ms, seed, self.device_name, weight)

    @property
    def max_decisions(self) -> int:
        """A configuration is one decision."""
        return 1

    def training_step(self, batch: PromptBatch) -> Metrics:
        cache = self.runner.results
        lookups, hits = cache.num_lookups, cache.num_hits
        metrics = super().training_step(batch)
        new = {"lookups": cache.num_lookups - lookups, "hits": cache.num_hits - hits}
        counts = reduce_over_ranks(sums=new, device=self.device_name)
        metrics["train/loss"] = metrics["train/policy_gradient_loss"]
        metrics["throughput/train/cache_hit_rate"] = counts["hits"] / max(counts["lookups"], 1.0)
        self.epoch_sums.add(int(metrics["train/num_configs"]), epoch_metrics(metrics, "train"), metrics["train/loss"])
        return metrics

    def validate(self) -> Metrics:
        with self.environment.measuring(self.config.latency.validation == "measured"):
            return super().validate()

    # An epoch

    @property
    def is_at_end_of_epoch(self) -> bool:
        """Whether the current step was the last of an epoch."""
        return self.global_step > 0 and self.train_sampler.batches_done == 0

    def due(self, frequency: int) -> bool:
        """Every epoch ends with a validation and a checkpoint."""
        return super().due(frequency) or self.is_at_end_of_epoch

    def run_validation(self) -> None:
        """Validate; at the end of an epoch, also update the learning rate, the tables and the epoch's files."""
        super().run_validation()
        if self.is_at_end_of_epoch:
            self.end_epoch(self.train_sampler.epoch)

    def is_validated(self) -> bool:
        """False at the end of an epoch: a repeated validation is in the manifest, but `end_epoch`'s changes are not."""
        return not self.is_at_end_of_epoch and super().is_validated()

    def end_epoch(self, epoch: int) -> None:
        """Log the epoch and write the controller's weights; collective."""
        validation = EpochSums()
        validation.add(1, epoch_metrics(self.step_metrics, "eval"))
        rows = {"Train": self.epoch_sums.row(epoch), "Val": validation.row(epoch)}
        reward = rows["Val"]["reward_mean"]
        self.lr_scheduler.step(reward)
        is_best, self.best_reward = reward > self.best_reward, max(reward, self.best_reward)
        self.epoch_sums = EpochSums()
        for kind, row in rows.items():
            self.logger.log_epoch(kind, row)
        weights = {name: to_full(tensor).cpu() for name, tensor in self.model.state_dict().items()}
        info = {"epoch": epoch, "val_reward": reward, "config": self.model_config.to_dict()}
        names = [f"checkpoint_epoch_{epoch}.pt", *([BEST_MODEL] if is_best else [])]
        on_rank_zero(lambda: save_weights([self.run_dir / name for name in names], weights, info))

    def data_state(self) -> dict[str, Any]:
        state = {"epoch_sums": asdict(self.epoch_sums), "best_reward": self.best_reward}
        terms = {"reward_terms": self.reward_terms(), "vlm_fingerprint": self.vlm_fingerprint}
        return {**super().data_state(), **state, **terms, "vlm_dtype": self.vlm_dtype}

    def load_data_state(self, state: dict[str, Any]) -> None:
        if "epoch_sums" not in state:  # first, because the advice for other data assumes a controller
            raise UserError(
                f"{self.checkpoint} is not a checkpoint of the stage budget; specify one, or set "
                "trainer.experiment_name to a new name and trainer.resume_from_path=null"
            )
        super().load_data_state(state)
        self.epoch_sums = EpochSums(**state["epoch_sums"])
        self.best_reward, self.saved_reward_terms = state["best_reward"], state["reward_terms"]
        # checkpoints of earlier versions lack these
        self.saved_fingerprint, self.saved_dtype = state.get("vlm_fingerprint"), state.get("vlm_dtype", "auto")

    def reward_terms(self) -> dict[str, Any]:
        """What a validation's reward depends on besides the controller."""
        latency, controller = self.config.latency, self.config.controller
        return {
            "budgets_ms": self.budgets_ms,
            "reward": asdict(self.config.reward),
            "latency": (latency.source, latency.percentile, latency.validation),
            "latency_model": asdict(self.latency.model) if isinstance(self.latency, ModeledLatency) else None,
            "tier_sizes": list(controller.tier_sizes),
            "max_new_tokens": controller.max_new_tokens,
            "question_suffix": self.config.data.question_suffix,
        }

    def load_checkpoint(self) -> int:
        """Forget the best reward if what rewards depend on has changed."""
        step = super().load_checkpoint()
        # empty: it starts at step 0
        saved, now = (settings_of_terms(terms) for terms in (self.saved_reward_terms or {}, self.reward_terms()))
        changed = [name for name in now if now[name] != saved.get(name, now[name])]  # earlier versions saved fewer
        if changed:
            self.best_reward = float("-inf")
            self.lr_scheduler.forget_best()
            if self.is_main:
                warn(
                    f"rewards before and after step {step} are not comparable, because of changes in "
                    f"{', '.join(changed)}; {BEST_MODEL} and the learning-rate plateau are reset"
                )
        return step


def settings_of_terms(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return `BudgetTrainer.reward_terms` by setting; budgets and latency model can follow from several settings."""
    found: dict[str, Any] = {}
    for name, value in terms.items():
        if name == "reward":
            found |= {f"reward.{key}": weight for key, weight in value.items()}
        elif name == "latency":
            found |= dict(zip(("latency.source", "latency.percentile", "latency.validation"), value))
        else:
            names = {"budgets_ms": "the budgets", "latency_model": "the latency model"}
            names |= {"question_suffix": "data.question_suffix"}
            found[names.get(name, f"controller.{name}")] = value
    return found


def epoch_metrics(metrics: Metrics, kind: str) -> dict[str, float]:
    """Return arguments of `EpochSums.add` from the metrics of a step (`train`) or a validation (`eval`)."""
    names = {"reward": "reward_total", "accuracy": "accuracy", "latency": "latency_ms"}
    values = {
        f"{column}_{statistic}": metrics[f"{kind}/{name}_{statistic}"]
        for column, name in names.items()
        for statistic in ("mean", "std")
    }
    return {**values, "budget_violation_rate": metrics[f"{kind}/budget_violation_mean"]}


def save_weights(paths: Sequence[Path], weights: Mapping[str, torch.Tensor], info: Mapping[str, Any]) -> None:
    """Write the weights of a controller to `.pt` files, which `load_weights` reads, atomically.

    Args:
        paths: paths of the files.
        weights: the controller's state on the CPU.
        info: additional keys of the files.

    Raises:
        UserError: a file cannot be written.
    """
    for path in paths:
        with write_errors(path), replacing(path) as temporary, FileWriter() as writer:
            writer.write_object(temporary, {STATE_KEY: dict(weights), **info})
