"""The stages with their configurations and trainers. Imports neither torch nor a trainer."""

from __future__ import annotations

import importlib.util
import math
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from verl_ext.commands import program
from verl_ext.config.compose import Composer, load_yaml
from verl_ext.config.recipes import RECIPES, find_recipe
from verl_ext.config.run_config import num_updates, read_config_file
from verl_ext.config.schema import keys, section, setting
from verl_ext.controller.config import (
    BudgetActorConfig,
    BudgetRewardConfig,
    ControllerConfig,
    LatencyConfig,
    SkipSamplingConfig,
)
from verl_ext.data.config import (
    ChatDataConfig,
    DataConfig,
    EvaluatedDataConfig,
    ImageChatDataConfig,
    PromptDataConfig,
    QuestionDataConfig,
)
from verl_ext.errors import UserError
from verl_ext.grpo.config import (
    ActorConfig,
    AlgorithmConfig,
    GroupConfig,
    RewardConfig,
    RolloutConfig,
    TokenActorConfig,
    TokenAlgorithmConfig,
)
from verl_ext.health.config import HealthConfig
from verl_ext.metrics.run_record import RunRecord
from verl_ext.trainer.config import (
    BudgetModelConfig,
    BudgetTrainerConfig,
    BudgetWatchConfig,
    GRPOModelConfig,
    ModelConfig,
    OptimConfig,
    PlateauOptimConfig,
    RewardTrainerConfig,
    SFTModelConfig,
    SFTTrainerConfig,
    TokenTrainerConfig,
    TrainerConfig,
    VLMSFTModelConfig,
    VLMWatchConfig,
    WatchConfig,
)


@dataclass(kw_only=True)
class RunConfig:
    """The configuration that all stages share."""

    stage: str = setting("sft", "Stage; set in the recipe")
    recipe: str | None = setting(None, "Recipe; set by the launcher")
    prepare: list[str] = setting([], "`verl_ext.data.prepare` arguments, run if their output is missing")
    data: DataConfig = section(DataConfig)
    model: ModelConfig = section(ModelConfig)
    optim: OptimConfig = section(OptimConfig)
    trainer: TrainerConfig = section(TrainerConfig)
    eval: WatchConfig = section(WatchConfig)
    health: HealthConfig = section(HealthConfig)

    use_remove_padding = False  # a key of SFT only

    @property
    def sequence_parallel_size(self) -> int:
        """Ranks that share a sequence."""
        return 1

    @property
    def packs_samples(self) -> bool:
        """Whether the configuration allows packing samples into rows."""
        return False

    @property
    def num_mini_batches(self) -> int:
        """Number of mini-batches into which a step's samples are divided, each for one update."""
        return 1

    @property
    def updates_per_step(self) -> int:
        """Number of optimizer updates per step; each advances the learning-rate schedule."""
        return 1

    def check(self) -> None:
        """Refuse contradictory settings of several components."""
        if self.eval.watch and "hf_model" not in self.trainer.checkpoint.save_contents:
            raise UserError(
                "eval.watch=true evaluates the export of each checkpoint; add hf_model to trainer.checkpoint."
                "save_contents"
            )

    def check_ranks(self, world_size: int) -> None:
        """Refuse a batch that does not divide over the ranks.

        Args:
            world_size: number of ranks on all nodes.

        Raises:
            UserError: the message suggests values that work together.
        """
        require_divisible(self, world_size, None)


@dataclass(kw_only=True)
class SFTConfig(RunConfig):
    """Supervised fine-tuning."""

    data: ChatDataConfig = section(ChatDataConfig)
    model: SFTModelConfig = section(SFTModelConfig)
    trainer: SFTTrainerConfig = section(SFTTrainerConfig)
    ulysses_sequence_parallel_size: int = setting(
        1, "Ranks per sequence; above 1 needs GPUs, flash-attention and use_remove_padding", ge=1
    )
    use_remove_padding: bool = setting(False, "verl's forward pass without padding, for Ulysses")

    @property
    def sequence_parallel_size(self) -> int:
        return self.ulysses_sequence_parallel_size

    @property
    def packs_samples(self) -> bool:
        """False with Ulysses, because verl's forward pass then takes padded samples."""
        return bool(self.data.packing) and self.sequence_parallel_size == 1

    def check(self) -> None:
        super().check()
        if self.data.packing is True and self.model.attn_implementation == "eager":
            raise UserError(
                "data.packing=true does not work with model.attn_implementation=eager, which takes padded samples "
                "only; set one of them to auto"
            )
        if self.ulysses_sequence_parallel_size > 1 and not self.use_remove_padding:
            raise UserError("ulysses_sequence_parallel_size is above 1; set use_remove_padding=true, which it needs")

    def check_ranks(self, world_size: int) -> None:
        size = self.ulysses_sequence_parallel_size
        if world_size % size:
            raise UserError(
                f"ulysses_sequence_parallel_size {size} does not divide the {world_size} ranks; choose a divisor of "
                f"{world_size}"
            )
        if size > 1 and importlib.util.find_spec("flash_attn") is None:
            raise UserError("ulysses_sequence_parallel_size above 1 needs GPUs and the flash-attn package; install it")
        super().check_ranks(world_size)


@dataclass(kw_only=True)
class VLMSFTConfig(RunConfig):
    """Supervised fine-tuning of a vision-language model with randomly skipped parts."""

    stage: str = setting("vlm_sft", "Stage; set in the recipe")
    data: ImageChatDataConfig = section(ImageChatDataConfig)
    model: VLMSFTModelConfig = section(VLMSFTModelConfig)
    eval: VLMWatchConfig = section(VLMWatchConfig)
    configurations: SkipSamplingConfig = section(SkipSamplingConfig)


@dataclass(kw_only=True)
class RewardStageConfig(RunConfig):
    """The configuration that stages with rewards share."""

    data: EvaluatedDataConfig = section(EvaluatedDataConfig)
    trainer: RewardTrainerConfig = section(RewardTrainerConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig)
    actor: ActorConfig = section(ActorConfig)
    rollout: GroupConfig = section(GroupConfig)

    def check(self) -> None:
        super().check()
        if self.trainer.test_freq != self.data.eval_every_steps:
            raise UserError(
                f"trainer.test_freq={self.trainer.test_freq} differs from data.eval_every_steps="
                f"{self.data.eval_every_steps}, which sets the validation interval in this stage; set "
                "data.eval_every_steps and omit trainer.test_freq"
            )

    @property
    def num_mini_batches(self) -> int:
        return num_updates(self.data.train_batch_size, self.actor.ppo_mini_batch_size)

    @property
    def updates_per_step(self) -> int:
        return num_updates(self.data.train_batch_size, self.actor.ppo_mini_batch_size, self.actor.ppo_epochs)


@dataclass(kw_only=True)
class GRPOConfig(RewardStageConfig):
    """GRPO of a language model."""

    stage: str = setting("grpo", "Stage; set in the recipe")
    data: PromptDataConfig = section(PromptDataConfig)
    model: GRPOModelConfig = section(GRPOModelConfig)
    algorithm: TokenAlgorithmConfig = section(TokenAlgorithmConfig)
    actor: TokenActorConfig = section(TokenActorConfig)
    rollout: RolloutConfig = section(RolloutConfig)
    trainer: TokenTrainerConfig = section(TokenTrainerConfig)
    reward: RewardConfig = section(RewardConfig)

    def check(self) -> None:
        super().check()
        data = self.data
        if data.eval_every_steps and data.eval_split == "test" and not data.val_files:
            raise UserError(
                f"data.eval_every_steps is {data.eval_every_steps}, but data.val_files is not set; set data.val_files, "
                "set data.eval_split=train to evaluate on training prompts, or set data.eval_every_steps=0"
            )
        if self.actor.policy_loss.loss_mode == "kl_cov" and self.updates_per_step == 1:
            raise UserError(
                "actor.policy_loss.loss_mode=kl_cov penalizes the change of the policy within a step, which is 0 with "
                "one update per step; set actor.ppo_epochs or actor.ppo_mini_batch_size for several updates, or choose "
                "another loss"
            )

    def check_ranks(self, world_size: int) -> None:
        size = self.rollout.tensor_model_parallel_size
        if world_size % size:
            raise UserError(
                f"rollout.tensor_model_parallel_size is {size}, which does not divide the {world_size} ranks; choose a "
                f"divisor of {world_size}"
            )
        require_divisible(self, world_size, self.actor.ppo_mini_batch_size, unit=size)
        num_prompts = self.actor.ppo_mini_batch_size or self.data.train_batch_size
        num_samples = num_prompts // (world_size // self.sequence_parallel_size) * self.rollout.n
        self.actor.check_micro_batches(num_samples, self.data.micro_batch_size_per_gpu)


@dataclass(kw_only=True)
class BudgetConfig(RewardStageConfig):
    """GRPO of a budget controller."""

    stage: str = setting("budget", "Stage; set in the recipe")
    data: QuestionDataConfig = section(QuestionDataConfig)
    model: BudgetModelConfig = section(BudgetModelConfig)
    optim: PlateauOptimConfig = section(PlateauOptimConfig)
    trainer: BudgetTrainerConfig = section(BudgetTrainerConfig)
    eval: BudgetWatchConfig = section(BudgetWatchConfig)
    actor: BudgetActorConfig = section(BudgetActorConfig)
    controller: ControllerConfig = section(ControllerConfig)
    latency: LatencyConfig = section(LatencyConfig)
    reward: BudgetRewardConfig = section(BudgetRewardConfig)

    def check(self) -> None:
        super().check()
        if self.controller.dropout and self.updates_per_step > 1:
            raise UserError(
                "with several updates per step, dropout alone would move the probability ratios away from 1; set "
                "controller.dropout=0, or actor.ppo_epochs=1 with actor.ppo_mini_batch_size=null"
            )
        if self.controller.budgets_of_full is not None and self.latency.source != "model":
            raise UserError(
                "controller.budgets_of_full needs the latency model; set latency.source=model, or use "
                "controller.budgets_ms instead of controller.budgets_of_full"
            )

    def check_ranks(self, world_size: int) -> None:
        require_divisible(self, world_size, self.actor.ppo_mini_batch_size)


# Batches and ranks


def require_divisible(config: RunConfig, world_size: int, mini_batch: int | None, unit: int = 1) -> None:
    """Refuse a batch that does not divide into mini-batches, or an update that does not divide over the ranks.

    Args:
        world_size: number of ranks on all nodes.
        mini_batch: samples of an update over all ranks; None for the whole batch.
        unit: number of ranks that must stay together, such as those of an engine.
    """
    sequence_parallel, batch = config.sequence_parallel_size, config.data.train_batch_size
    ranks, divided = world_size // sequence_parallel, mini_batch or batch
    if divided % ranks == 0 and batch % divided == 0:
        return
    given = {"data.train_batch_size": batch}
    rule = f"must be a multiple of the number of data-parallel ranks, {ranks}"
    if mini_batch is not None:
        given["actor.ppo_mini_batch_size"] = mini_batch
        rule = f"must be a multiple of actor.ppo_mini_batch_size={mini_batch}, which {rule}"
    working = dict(zip(given, nearest_batches(batch, mini_batch, ranks)))
    changes = " ".join(f"{key}={value}" for key, value in working.items() if value != given[key])
    unit = math.lcm(config.trainer.nnodes, sequence_parallel, unit)
    most = min(world_size, divided * sequence_parallel + 1)
    counts = [count for count in range(unit, most, unit) if divided % (count // sequence_parallel) == 0]
    or_fewer = f", or start {counts[-1]} ranks" if batch % divided == 0 and counts and counts[-1] > 1 else ""
    raise UserError(f"data.train_batch_size={batch} {rule}; set {changes}{or_fewer}")


def nearest_batches(batch: int, mini_batch: int | None, ranks: int) -> tuple[int, int]:
    """Return the nearest global batch and mini-batch that divide over the ranks and into each other.

    Args:
        batch: samples of a step, over all ranks.
        mini_batch: samples of an update, over all ranks; None for the whole batch.
        ranks: data-parallel ranks.
    """
    wanted = batch if mini_batch is None else mini_batch
    if batch % ranks == 0:  # it can stay
        sizes = [size for size in range(ranks, batch + 1, ranks) if batch % size == 0]
        return batch, min(sizes, key=lambda size: (abs(size - wanted), -size))
    size = _nearest_multiple(wanted, ranks)
    return _nearest_multiple(batch, size), size


def _nearest_multiple(number: int, divisor: int) -> int:
    return max(1, (number + divisor // 2) // divisor) * divisor


# The registry


@dataclass(frozen=True)
class Stage:
    """One entry of the stage registry: configuration class, trainer and data loader.

    Attributes:
        command: sft or grpo, for `run_sft.sh` and `run_grpo.sh`.
        root: configuration class.
        trainer: trainer class, as module:name.
        datasets: function that loads training and validation set, as module:name.
        caches_tokens: whether one rank per node caches the tokenized data for the others.
        uses_chat_template: whether a chat template renders its data.
    """

    command: str
    root: type[RunConfig]
    trainer: str
    datasets: str
    caches_tokens: bool = False
    uses_chat_template: bool = False

    def trainer_class(self) -> Any:
        """Import the trainer."""
        return pkgutil.resolve_name(self.trainer)

    def load_datasets(self, config: RunConfig, tokenizer: Any, progress: bool = False) -> tuple[Any, Any]:
        """Load training and validation set.

        Chat templates that use the date get that of the run's first start, so that a resumed run has the same tokens.
        """
        load = pkgutil.resolve_name(self.datasets)
        if not self.uses_chat_template:
            return load(config.data, progress)
        return load(config.data, tokenizer, progress, RunRecord(config.trainer.run_dir).first_start())


STAGES = {
    "sft": Stage(
        command="sft",
        root=SFTConfig,
        trainer="verl_ext.trainer.sft:SFTTrainer",
        datasets="verl_ext.data.chats:load_chats",
        caches_tokens=True,
        uses_chat_template=True,
    ),
    "vlm_sft": Stage(
        command="sft",
        root=VLMSFTConfig,
        trainer="verl_ext.trainer.vlm_sft:VLMSFTTrainer",
        datasets="verl_ext.data.image_chats:load_image_chats",
    ),
    "grpo": Stage(
        command="grpo",
        root=GRPOConfig,
        trainer="verl_ext.trainer.grpo:GRPOTrainer",
        datasets="verl_ext.data.prompts:load_prompts",
        uses_chat_template=True,
    ),
    "budget": Stage(
        command="grpo",
        root=BudgetConfig,
        trainer="verl_ext.trainer.budget:BudgetTrainer",
        datasets="verl_ext.data.image_questions:load_image_questions",
    ),
}


def stages_of(command: str) -> list[str]:
    """Return the stages of a command; the first is the default of recipes."""
    return [name for name, stage in STAGES.items() if stage.command == command]


def load_config(command: str, words: Iterable[str]) -> RunConfig:
    """Resolve `recipe=NAME key=value ...` to one configuration.

    Args:
        command: `sft` or `grpo`; the recipe selects one of its stages.
        words: Hydra overrides (`key=value`, `+key=value`, `~key`); `recipe=` names a recipe or a YAML file.

    Raises:
        UserError: an unknown recipe or key, an invalid value, an interpolation without target, a secret, or a stage
            that the command does not have.
    """
    overrides = list(words)
    recipe, _, stage = chosen_recipe(command, overrides)
    composer = composer_of(stage)
    composer.add_recipe_file(recipe)
    composer.add_overrides(word for word in overrides if not word.startswith("recipe="))
    values = composer.values
    if values["stage"] != stage:
        raise UserError(
            f"stage={values['stage']} cannot be set on the command line; select a recipe of that stage with recipe=NAME"
        )
    composer.set_key("recipe", recipe.stem)
    config: RunConfig = composer.build()
    return config


def read_config(path: Path) -> RunConfig:
    """Read the resolved configuration of a run; keys that it lacks get their defaults.

    Raises:
        UserError: the file cannot be read, or has a key or value that its stage does not have.
    """
    return _config_of_values(read_config_file(path), str(path))


def config_of(config: DictConfig) -> RunConfig:
    """Convert a resolved configuration from verl, by the same rules as a recipe.

    Raises:
        UserError: it has a key or value that its stage does not have.
    """
    return _config_of_values(cast("dict[str, Any]", OmegaConf.to_container(config, resolve=True)), "the configuration")


def _config_of_values(values: dict[str, Any], source: str) -> RunConfig:
    stage = _known_stage(values.get("stage", "sft"), source)
    composer = composer_of(stage)
    composer.add_config(values, source)
    config: RunConfig = composer.build()
    return config


def _known_stage(stage: Any, source: str | Path) -> str:
    if stage not in [*STAGES]:  # a list, because a YAML value may not be hashable
        raise UserError(f"{source} has the stage {stage!r}; the stages are {', '.join(STAGES)}")
    return str(stage)


def composer_of(stage: str) -> Composer:
    """Return a composer of a stage's configuration with defaults; keys of other stages have no effect."""
    return Composer(STAGES[stage].root, [other.root for name, other in STAGES.items() if name != stage])


def chosen_recipe(command: str, words: Iterable[str]) -> tuple[Path, dict[str, Any], str]:
    """Return file, content and stage of the recipe that `recipe=` names, or of the default recipe.

    Raises:
        UserError: there is no such recipe, or the command does not have its stage.
    """
    names = [text.removeprefix("recipe=") for text in words if text.startswith("recipe=")]
    recipe = find_recipe(command, names[-1] if names else None)
    content = load_yaml(recipe)
    folder = recipe.resolve().parent
    owner = folder.name if folder.parent == RECIPES.resolve() and stages_of(folder.name) else command
    stage = _known_stage(content.get("stage", stages_of(owner)[0]), recipe)
    if stage not in stages_of(command):
        start = f"{program(STAGES[stage].command)} NUM_RANKS recipe={names[-1] if names else recipe}"
        raise UserError(f"{recipe} is a recipe for the stage {stage}; start it with `{start}`")
    return recipe, content, stage


def keys_set_by(stage: str, words: Iterable[str]) -> set[str]:
    """Return the dotted keys that command-line arguments set."""
    return composer_of(stage).keys_set_by(word for word in words if not word.startswith("recipe="))


def known_keys(command: str, words: Iterable[str]) -> list[str]:
    """Return the keys that have an effect in the stage of the recipe in `words`, for suggestions."""
    try:
        *_, stage = chosen_recipe(command, words)
    except UserError:  # a different mistake from the one that needs a suggestion
        stage = stages_of(command)[0]
    return [name for name, key in keys(STAGES[stage].root).items() if not key.setting.unused]


def sft_recipe_of(run_dir: Path) -> Path | None:
    """Return the file in `recipes/sft/` whose project and experiment name a run directory; None if there is none."""
    for path in sorted((RECIPES / "sft").glob("*.yaml")):
        trainer = load_yaml(path).get("trainer", {})
        if run_dir.parts[-2:] == tuple(trainer.get(f"{key}_name") for key in ("project", "experiment")):
            return path
    return None
