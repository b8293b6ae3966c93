"""The trainers of the stages that learn from rewards, built and run on one rank: the effect of their keys."""

from __future__ import annotations

import json
import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pandas as pd
import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer

from tests.helpers.data import write_questions
from tests.helpers.vlms import write_model
from verl_ext.checkpoint.manifest import read_complete
from verl_ext.config.schema import set_at
from verl_ext.controller.distribution import ConfigurationDistribution, num_uniforms
from verl_ext.controller.inference import load_adaptive_model
from verl_ext.controller.latency import FEATURES, LatencyModel, ModeledLatency
from verl_ext.controller.source import ControllerSource
from verl_ext.controller.vlm import fingerprint, load_adapter, load_controller
from verl_ext.distributed import build_meshes
from verl_ext.errors import Stop, UserError
from verl_ext.hardware import pick_precision
from verl_ext.metrics.csv_tables import EpochSums
from verl_ext.metrics.jsonl import SAMPLES_FILE
from verl_ext.trainer.budget import BudgetTrainer
from verl_ext.trainer.device import resolve_device
from verl_ext.trainer.grpo import GRPOTrainer, prompts_of
from verl_ext.trainer.stages import STAGES, RunConfig, load_config
from verl_ext.trainer.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_rank")
TIERS = (256, 1024, 4096)
OF_ANY_RUN = ["trainer.logger=[]", "trainer.save_freq=-1", "health.enabled=false", "trainer.log_samples_every=1"]
OF_ANY_RUN += ["trainer.total_training_steps=2"]
CONTROLLER = [
    *("controller.tier_sizes=[256,1024,4096]", "controller.min_active=2", "controller.max_active=3"),
    *("controller.topk_choices=[1,2,4]", "controller.max_new_tokens=3", "controller.hidden=24"),
    *("controller.budgets_ms=[60,200]", "controller.dtype=bf16", "controller.max_encodings=5"),
]
LEARNING = [
    *("algorithm.norm_adv_by_std_in_grpo=false", "actor.tier_entropy_weight=2.5", "actor.entropy_coeff=0.01"),
    *("actor.clip_ratio_low=0.11", "actor.clip_ratio_high=0.22", "actor.clip_ratio_c=3.3"),
    *("optim.plateau_factor=0.3", "optim.plateau_patience=4", "latency.validation=measured"),
]
WEIGHTS = {"accuracy": 2, "latency_penalty": 3, "budget_violation": 4, "efficiency": 5, "complexity": 6}


def trainer_of(config: RunConfig) -> GRPOTrainer:
    """The trainer that a rank builds for a configuration."""
    torch.manual_seed(config.trainer.seed)
    device_name = resolve_device(config)
    tokenizer, stage = load_tokenizer(config), STAGES[config.stage]
    return stage.trainer_class()(
        config, *build_meshes(device_name, 1), tokenizer, *stage.load_datasets(config, tokenizer)
    )


def budget_trainer(tmp_path: Path, *overrides: str) -> BudgetTrainer:
    """A budget trainer whose keys all differ from their defaults."""
    model, questions = write_model(tmp_path / "model"), write_questions(tmp_path / "questions", 4, 2)
    name = fingerprint(load_adapter(str(model), TIERS, dtype=torch.bfloat16).model)
    latency = LatencyModel({part: dict.fromkeys(keys, 0.01) for part, keys in FEATURES.items()}, 1.0, "none", name)
    latency.save(tmp_path / "latency.json")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"# tiny\nstage: budget\ndata: {{datasets: {{tiny: {{source: {questions}}}}}}}\n")
    words = [f"recipe={recipe}", f"model.partial_pretrain={model}", f"latency.file={tmp_path / 'latency.json'}"]
    words += [f"trainer.default_local_dir={tmp_path / 'run'}", "data.train_batch_size=2", "trainer.samples_per_table=3"]
    words += [f"reward.{part}={weight}" for part, weight in WEIGHTS.items()]
    trainer = trainer_of(load_config("grpo", [*words, *OF_ANY_RUN, *CONTROLLER, *LEARNING, *overrides]))
    assert isinstance(trainer, BudgetTrainer)
    return trainer


@pytest.fixture
def controlled(tmp_path: Path) -> BudgetTrainer:
    return budget_trainer(tmp_path)


def test_new_controller_prefers_important_blocks(tmp_path: Path) -> None:
    scores = {"1": 0.1, "2": -1.0, "3": 0.9}
    (tmp_path / "importance.json").write_text(json.dumps({"merged_scores": scores}))
    trainer = budget_trainer(tmp_path, f"controller.importance_file={tmp_path / 'importance.json'}")
    controller = trainer.build_controller()
    values = torch.tensor([*scores.values()])
    torch.testing.assert_close(controller.block_head.bias.data, (values - values.mean()) / values.std(correction=0))
    uniforms = torch.rand(200, num_uniforms(controller.space), dtype=torch.float64)
    features = (torch.randn(200, width) for width in (controller.config.vision_width, controller.config.language_width))
    logits = controller(*features, torch.full((200,), 100.0))
    active = ConfigurationDistribution(controller.space, *logits).sample(uniforms).masks.float().mean(0)
    assert active[-1] > active[-3] > active[-2], active  # blocks 3, 1 and 2


def test_budget_trainer_follows_configuration(controlled: BudgetTrainer) -> None:
    knobs, loss = controlled.model_config, controlled.step.actor
    assert (knobs.hidden, knobs.vlm["tier_sizes"], knobs.vlm["max_new_tokens"]) == (24, list(TIERS), 3)
    assert (knobs.space.min_active, knobs.space.max_active, knobs.space.topk_choices) == (2, 3, (1, 2, 4))
    assert (knobs.low_ms, knobs.high_ms) == (60, 200)
    assert (loss.clip_ratio_low, loss.clip_ratio_high, loss.clip_ratio_c, loss.entropy_coeff) == (0.11, 0.22, 3.3, 0.01)
    assert controlled.runner.adapter.model.dtype == torch.bfloat16
    assert not controlled.step.algorithm.norm_adv_by_std_in_grpo
    assert (controlled.lr_scheduler.factor, controlled.lr_scheduler.patience) == (0.3, 4)
    assert list(vars(controlled.config.reward).values()) == [2, 3, 4, 5, 6]


def test_encoding_cache_keeps_configured_number(controlled: BudgetTrainer) -> None:
    places = list(product(controlled.train_dataset.samples, range(len(TIERS))))
    first = controlled.runner.encoded(*places[0])
    for place in places[1:5]:
        controlled.runner.encoded(*place)
    assert controlled.runner.encoded(*places[0]) is first  # which is the last used by now
    for place in places[1:6]:
        controlled.runner.encoded(*place)
    assert controlled.runner.encoded(*places[0]) is not first


def test_tier_term_of_entropy_bonus_is_weighted(controlled: BudgetTrainer) -> None:
    controlled.fsdp_model.eval()  # no dropout
    trajectories = controlled.step.rollout(prompts_of([controlled.train_dataset[0]]), 1, 2)
    batch = controlled.policy.collate(trajectories)
    bonus = controlled.policy.log_probs(batch)
    distribution = ConfigurationDistribution(
        controlled.model_config.space,
        *controlled.model(batch["vision"], batch["language"], batch["budgets_ms"]),
    )
    torch.testing.assert_close(bonus.entropy_bonus[:, 0], distribution.entropy_bonus(2.5))
    torch.testing.assert_close(bonus.entropy[:, 0], distribution.entropy_bonus(1.0))  # what train/entropy averages
    assert not torch.allclose(bonus.entropy[:, 0], bonus.entropy_bonus[:, 0])


@pytest.mark.parametrize(
    ("key", "budgets", "says"),
    [
        ("budgets_ms", [12.1, 40.0], None),
        # between what the configuration takes and what it takes with the decision
        ("budgets_ms", [11.0, 40.0], r"controller.budgets_ms starts at 11 ms, .*12.0 ms; start at 12.6 ms or more"),
        # the full model takes 20 ms
        ("budgets_of_full", [0.55, 2.0], r"controller.budgets_of_full starts at 0.55 \(11.0 ms\).*at 0.63 or more"),
    ],
)
def test_rejects_budget_below_decision_time(
    key: str, budgets: list[float], says: str | None, controlled: BudgetTrainer
) -> None:
    weights = {part: dict.fromkeys(names, 0.0) for part, names in FEATURES.items()}
    weights["prefill_ms"]["call"] = 10.0
    controlled.latency = ModeledLatency(LatencyModel(weights, 1.0, "a machine", "a model", deciding_ms=2.0))
    set_at(controlled.config, f"controller.{key}", budgets)
    low_ms = budgets[0] * (20.0 if key == "budgets_of_full" else 1.0)
    controlled.budgets_ms = (low_ms, 40.0)
    with pytest.raises(UserError, match=says) if says else nullcontext():
        controlled.require_reachable_budgets()


def test_sharded_controller_returns_no_view(controlled: BudgetTrainer) -> None:
    """FSDP2 warns of an output that is a view."""
    trajectories = controlled.step.rollout(prompts_of([controlled.train_dataset[0]]), 1, 2)
    batch = controlled.policy.collate(trajectories)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        controlled.policy.log_probs(batch)


def test_export_names_model_by_absolute_path(
    controlled: BudgetTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(str(controlled.config.model.partial_pretrain))
    monkeypatch.chdir(model.parent)
    controlled.config.model.partial_pretrain = model.name
    controlled.build_controller().save_pretrained(tmp_path / "export")
    monkeypatch.chdir("/")
    assert load_controller(tmp_path / "export")[1].path == str(model.resolve())
    model.rename(model.with_name("moved"))
    with pytest.raises(UserError, match=f"{model.resolve()}, which does not exist; set --vlm to its new path"):
        load_controller(tmp_path / "export")
    assert load_controller(tmp_path / "export", str(model.with_name("moved")))[1].path.endswith("moved")


def test_rejects_question_with_image_token(controlled: BudgetTrainer) -> None:
    samples = controlled.val_dataset.samples
    samples[-1] = replace(samples[-1], question="what is <|image_pad|> ?")
    with pytest.raises(UserError, match=r"the question of val/tiny/\d+ contains <\|image_pad\|>"):
        controlled.build_runner()


def test_resuming_refuses_another_vision_language_model(controlled: BudgetTrainer) -> None:
    state = controlled.data_state()
    controlled.load_data_state({key: value for key, value in state.items() if key != "vlm_fingerprint"})
    controlled.build_runner()  # a checkpoint of an earlier version
    controlled.load_data_state(state)
    controlled.build_runner()
    controlled.load_data_state({**state, "vlm_fingerprint": "2:qwen3_vl_moe:0"})
    controlled.checkpoint = controlled.run_dir / "global_step_2"
    with pytest.raises(UserError, match="was trained for another vision-language model or dtype than .*init_from="):
        controlled.build_runner()


def test_auto_keeps_dtype_of_training_on_newer_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = budget_trainer(tmp_path, "controller.dtype=auto", "latency.source=measured")  # auto is fp32 on a CPU
    state, source = trainer.data_state(), ControllerSource(tmp_path / "export")
    trainer.checkpoint = trainer.run_dir / "global_step_2"
    controller = trainer.build_controller()
    controller.save_pretrained(source.export)

    def pick_bf16(setting: str, device: str) -> torch.dtype:
        return pick_precision("bf16" if setting == "auto" else setting, device)

    monkeypatch.setattr("verl_ext.trainer.budget.pick_precision", pick_bf16)
    monkeypatch.setattr("verl_ext.controller.inference.default_device", lambda name: ("cpu", pick_bf16(name, "cpu")))
    trainer.load_data_state(state)
    assert trainer.build_runner().adapter.model.dtype == torch.float32
    assert load_adaptive_model(source)[0].runner.adapter.model.dtype == torch.float32

    trainer.config.controller.dtype = "bf16"
    with pytest.raises(UserError, match=r"set controller.dtype to the previous dtype \(fp32\)"):
        trainer.build_runner()

    # earlier versions recorded no dtype
    trainer.config.controller.dtype = "auto"
    trainer.load_data_state({name: value for name, value in state.items() if name != "vlm_dtype"})
    with pytest.raises(UserError, match="auto depends on the device"):
        trainer.build_runner()
    controller.config.vlm.pop("dtype", None)
    controller.save_pretrained(source.export)
    with pytest.raises(UserError, match="trained for a model other than"):
        load_adaptive_model(source)


def test_resuming_refuses_checkpoint_without_controller_state(controlled: BudgetTrainer) -> None:
    state = controlled.data_state() | {"num_samples": 99}
    del state["epoch_sums"]
    controlled.checkpoint = controlled.run_dir / "global_step_2"
    with pytest.raises(UserError, match="global_step_2 is not a checkpoint of the stage budget") as refused:
        controlled.load_data_state(state)
    assert "init_from" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("controller.tier_sizes", [256, 1024, 9216]),
        ("controller.max_new_tokens", 9),
        ("data.question_suffix", " Think."),
        ("reward.efficiency", 0.9),
        ("latency.percentile", 90),
    ],
)
def test_settings_of_answers_make_rewards_incomparable(
    key: str, value: Any, controlled: BudgetTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {**controlled.data_state(), "best_reward": 0.5}
    earlier = {name: state["reward_terms"][name] for name in ("budgets_ms", "reward", "latency")}
    for terms in (state["reward_terms"], earlier):  # earlier versions saved fewer terms
        controlled.load_data_state({**state, "reward_terms": terms})
        controlled.load_checkpoint()
        assert controlled.best_reward == 0.5 and "not comparable" not in capsys.readouterr().err
    set_at(controlled.config, key, value)
    controlled.load_data_state(state)
    controlled.load_checkpoint()
    assert controlled.best_reward == float("-inf")
    assert f"are not comparable, because of changes in {key}; best_model.pt" in capsys.readouterr().err


def test_another_latency_model_makes_rewards_incomparable(
    controlled: BudgetTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {**controlled.data_state(), "best_reward": 0.5}
    assert isinstance(controlled.latency, ModeledLatency)
    controlled.latency = replace(controlled.latency, model=replace(controlled.latency.model, deciding_ms=7.0))
    controlled.load_data_state(state)
    controlled.load_checkpoint()
    assert controlled.best_reward == float("-inf")
    assert "are not comparable, because of changes in the latency model; best_model.pt" in capsys.readouterr().err


def test_interrupted_end_of_epoch_is_repeated_until_saved(tmp_path: Path) -> None:
    """Also if the run is killed after it has repeated the validation, but before it saves again."""

    def start_run() -> BudgetTrainer:
        return budget_trainer(tmp_path, "trainer.total_training_steps=4", "trainer.val_before_train=false")

    trainer = start_run()
    trainer.validate = Mock(side_effect=Stop("SIGTERM"))  # type: ignore[method-assign]
    with pytest.raises(Stop, match="SIGTERM"):
        trainer.fit()
    for _ in range(2):
        trainer = start_run()
        assert trainer.global_step == 2 and trainer.owes_validation and trainer.epoch_sums.num_samples
        trainer.training_step = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            trainer.fit()
        reward = read_complete(trainer.run_dir / "global_step_2").metrics["eval/reward_total_mean"]
        assert trainer.epoch_sums == EpochSums()
        assert trainer.best_reward == trainer.lr_scheduler.best == pytest.approx(reward)


def test_validation_may_use_latency_of_training(controlled: BudgetTrainer) -> None:
    controlled.config.trainer.log_samples_every = 0
    measured = [controlled.validate()["eval/latency_ms_mean"] for _ in range(2)]
    assert measured[0] != measured[1]
    controlled.config.latency.validation = "same"
    computed = [controlled.validate()["eval/latency_ms_mean"] for _ in range(2)]
    assert computed[0] == computed[1]


@pytest.mark.parametrize(("split", "count", "batches"), [("test", -1, 1), ("train", -1, 2), ("train", 1, 1)])
def test_evaluation_uses_configured_split_and_batches(
    split: Literal["test", "train"], count: int, batches: int, controlled: BudgetTrainer
) -> None:
    controlled.config.data.eval_split, controlled.config.data.eval_batches = split, count
    prompts = controlled.eval_batches()
    assert len(prompts) == batches
    prefix = "train/" if split == "train" else "val/"
    assert all(prompt.sample_id.startswith(prefix) for batch in prompts for prompt in batch)


def test_replacement_prompts_do_not_depend_on_interpreter(controlled: BudgetTrainer) -> None:
    """They are a function of seed and step via a digest of ours; none is of the step's batch or of another round."""
    controlled.rows_of_step = {2}

    def rows(step: int) -> list[int]:
        controlled.global_step = step
        rounds = [controlled.replacement_prompts(number, [0, 1]) for number in (1, 2)]
        return [prompt.index for prompts in rounds for prompt in prompts]

    found = [rows(step) for step in (1, 2, 3, 4)]
    assert all(sorted(each) == [0, 1, 3] for each in found)
    assert found == [[0, 1, 3], [0, 3, 1], [3, 0, 1], [1, 3, 0]]


def test_sample_tables_have_configured_number_of_rows_in_complete_groups(tmp_path: Path) -> None:
    controlled = budget_trainer(tmp_path, "rollout.n=4")  # more than trainer.samples_per_table
    controlled.fit()
    rows = [json.loads(line) for line in (controlled.run_dir / SAMPLES_FILE).read_text().splitlines()]
    found = {
        split: [(row["step"], row["number"]) for row in rows if row["split"] == split] for split in ("train", "eval")
    }
    assert found["train"] == [(step, number) for step in (1, 2) for number in range(4)]
    assert [step for step, _ in found["eval"]] == [0, 0, 2, 2]


def test_prompts_are_shared_only_if_configured(quickstart: Path, tmp_path: Path) -> None:
    words = [f"data.train_files={quickstart}/prompts.parquet", "data.val_files=null", "data.eval_every_steps=0"]
    words += [f"model.partial_pretrain={quickstart}/model", f"trainer.default_local_dir={tmp_path}", *OF_ANY_RUN]
    words += ["data.max_response_length=4", "reward.length_buffer=4"]  # so short that sharing is cheaper
    words += ["rollout.engine=hf"]
    for shares in (True, False):
        config = load_config("grpo", ["prepare=[]", *words, f"actor.share_prompts={str(shares).lower()}"])
        trainer = trainer_of(config)
        trajectories = trainer.step.rollout(prompts_of([trainer.train_dataset[0]]), 1, 4)
        micro_batch = trainer.policy.collate(trajectories)
        assert len(micro_batch["input_ids"]) == 1 and ("sample_lengths" in micro_batch) == (not shares)


@pytest.mark.parametrize("dtypes", [("bf16", "fp32"), ("fp32", "bf16")])
def test_adapters_with_reference_train_in_other_dtype(
    dtypes: tuple[str, str], quickstart: Path, tmp_path: Path
) -> None:
    """The adapters are disabled for the reference's log-probabilities, then generation gathers the weights."""
    words = [f"data.train_files={quickstart}/prompts.parquet", "data.val_files=null", "data.eval_every_steps=0"]
    words += [f"model.partial_pretrain={quickstart}/model", f"trainer.default_local_dir={tmp_path}", *OF_ANY_RUN]
    words += ["data.max_response_length=4", "reward.length_buffer=4", "rollout.engine=hf", "model.lora_rank=4"]
    words += ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=2", "actor.use_kl_loss=true"]
    words += [f"model.mixed_precision={dtypes[0]}", f"model.fsdp_config.model_dtype={dtypes[1]}"]
    trainer = trainer_of(load_config("grpo", ["prepare=[]", *words]))
    with trainer.build_reference()() as reference:
        assert all(layer.disable_adapters for layer in reference.modules() if isinstance(layer, BaseTunerLayer))
    trainer.fit()
    assert trainer.global_step == 2 and trainer.guard.num_skipped == 0


def test_evaluation_prompts_of_several_sources_are_measured_separately(quickstart: Path, tmp_path: Path) -> None:
    rows = pd.read_parquet(quickstart / "prompts.parquet").head(3)
    rows.assign(data_source=["one", "two", "two"]).to_parquet(tmp_path / "val.parquet")
    words = [f"data.train_files={quickstart}/prompts.parquet", f"data.val_files={tmp_path}/val.parquet"]
    words += [f"model.partial_pretrain={quickstart}/model", f"trainer.default_local_dir={tmp_path}", *OF_ANY_RUN]
    words += ["data.max_response_length=4", "reward.length_buffer=4", "rollout.engine=hf", "data.eval_batches=-1"]
    trainer = trainer_of(load_config("grpo", ["prepare=[]", *words]))
    trainer.config.trainer.log_samples_every = 0
    metrics = trainer.validate()
    trainer.environment.close()
    means = [metrics[f"eval/reward_total_mean_of_{source}"] for source in ("one", "two")]
    assert (means[0] + 2 * means[1]) / 3 == pytest.approx(metrics["eval/reward_total_mean"])
    assert "eval/code_tests_mean_of_two" in metrics
