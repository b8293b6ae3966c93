"""The budget stage: checks before ranks start, and its epoch tables."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoints import commit, flip_byte, save, truncate
from tests.helpers.data import write_questions
from verl_ext.config.schema import as_dict
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.source import find_controller
from verl_ext.controller.vlm import load_adapter, load_controller, load_weights
from verl_ext.data.image_questions import load_image_questions
from verl_ext.errors import UserError
from verl_ext.launch.preflight import check_budget_files, check_resumed_stage, check_settings
from verl_ext.launch.run import print_changes
from verl_ext.metrics.csv_tables import EPOCH_COLUMNS, EpochSums, EpochTables
from verl_ext.metrics.jsonl import MetricsRow
from verl_ext.metrics.registry import lookup_metric
from verl_ext.metrics.run_record import RunRecord
from verl_ext.metrics.sinks import LogFileSink, epoch_line, epoch_tags
from verl_ext.model_files import check_model_files
from verl_ext.trainer.budget import save_weights
from verl_ext.trainer.optimizer import PlateauScheduler
from verl_ext.trainer.stages import BudgetConfig, load_config

SIZES: dict[str, Any] = {
    **{"tiers": (256,), "num_blocks": 2, "min_active": 1, "max_active": 2, "topk_choices": ()},
    **{"vision_width": 8, "language_width": 8, "low_ms": 1.0, "high_ms": 2.0},
}
RECIPE = """
# of a budget controller
stage: budget
data: {{train_batch_size: 2, datasets: {{tiny: {{train: 4, source: {questions}}}}}}}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(questions=write_questions(tmp_path / "questions", 4, 2)))
    return path


def config_of(recipe: Path, *overrides: str) -> BudgetConfig:
    config = load_config("grpo", [f"recipe={recipe}", *overrides])
    assert isinstance(config, BudgetConfig)
    return config


def check_all(config: BudgetConfig) -> None:
    """Run all launcher checks of this stage, those before and those after data preparation."""
    config.trainer.n_gpus_per_node = 1
    check_settings(config)
    check_budget_files(config, ())


def test_recipe_names_its_stage(recipe: Path, tmp_path: Path) -> None:
    config = config_of(recipe, "data.datasets.tiny.val=1")
    check_all(config)
    assert config.stage == "budget" and config.data.datasets["tiny"] == {
        "train": 4,
        "source": str(tmp_path / "questions"),
        "val": 1,
    }
    with pytest.raises(UserError, match="for the stage budget; start it with `bash run_grpo.sh NUM_RANKS recipe="):
        load_config("sft", [f"recipe={recipe}"])
    with pytest.raises(UserError, match="stage=grpo cannot be set on the command line"):
        config_of(recipe, "stage=grpo")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("controller.budgets_ms=[90,10]", "two ascending, positive and finite numbers of milliseconds up to"),
        ("controller.budgets_ms=[10]", "two ascending, positive and finite numbers of milliseconds up to"),
        ("controller.budgets_ms=[0,60]", "two ascending, positive and finite numbers of milliseconds up to"),
        ("controller.budgets_ms=[60,inf]", "controller.budgets_ms.*finite"),
        ("controller.budgets_ms=[60,1e10]", "milliseconds up to 1,000,000,000"),
        (
            "controller.budgets_of_full=[0.6,0.3]",
            "two ascending, positive and finite fractions of the full model's latency",
        ),
        ("latency.percentile=80", "must be 50, 75, 90 or 95"),
        ("rollout.n=1", "rollout.n is 1"),
        ("latency.source=guessed", "must be model or measured"),
        ("latency.file=/nowhere.json", "latency.file=/nowhere.json does not exist"),
        ("controller.importance_file=/nowhere.json", "does not exist"),
        ("optim.lr_scheduler=cosine", "optim.lr_scheduler has no effect here"),
        ("eval.watch=true", "eval.watch has no effect"),
        ("model.mixed_precision=bf16", "model.mixed_precision has no effect here.*controller.dtype"),
        ("model.mixed_precision=auto", "model.mixed_precision has no effect here.*controller.dtype"),
        ("data.eval_batches=0", "data.eval_batches is 0.*-1 for all"),
        ("controller.tier_sizes=[a,b,c]", "controller.tier_sizes.*list .* of integers"),
        ("controller.tier_sizes=[]", "controller.tier_sizes is .*ascending integers"),
        ("controller.tier_sizes=[12,6]", "controller.tier_sizes is .*ascending integers"),
        ("controller.topk_choices=[a]", "controller.topk_choices.*list .* of integers"),
        ("data.eval_every_steps=0", "or -1 for the epochs' ends"),
        ("actor.ppo_epochs=2", "set controller.dropout=0"),
        ("data.datasets.tiny.train=0", "there are no questions for train"),
        ("data.datasets.tiny.val=0", "there are no questions for val"),
        ("data.datasets.tiny.train=many", "must be a number of rows, or -1 for all"),
        ("data.datasets.tiny.size=3", "it must be a mapping of train, val, source, metric"),
        ("data.datasets.tiny.metric=bleu", "choose one of vqa, cider"),
        ("data.datasets.tiny.source=/nowhere", "has no train\\*.parquet"),
        ("data.datasets.mine={train: 3}", "is none of text_vqa, coco_2014_vqa, okvqa, coco_caption"),
    ],
)
def test_invalid_settings_are_rejected(override: str, message: str, recipe: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_all(config_of(recipe, override))


def test_budgets_of_full_need_latency_model(recipe: Path) -> None:
    shares = "controller.budgets_of_full=[0.3,0.6]"
    check_all(config_of(recipe, shares, "data.datasets.tiny.val=2"))
    with pytest.raises(UserError, match="set latency.source=model"):
        config_of(recipe, shares, "latency.source=measured")


def test_fewer_questions_than_batch_size_are_rejected(recipe: Path) -> None:
    with pytest.raises(UserError, match="there are 4 questions to train on"):
        load_image_questions(config_of(recipe, "data.train_batch_size=50").data)


@pytest.mark.parametrize(
    ("stage", "remedy"),
    [
        ("budget", None),
        ("vlm_sft", "and model.sft_run=RUN to train a controller of its model"),
        ("sft", ""),
        ("grpo", ""),
        (None, None),
    ],
)
def test_checkpoint_of_another_stage_is_not_resumed(
    stage: str | None, remedy: str | None, recipe: Path, tmp_path: Path
) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    for run_dir in (own, other):
        (run_dir / "global_step_2").mkdir(parents=True)
        RunRecord(run_dir).mark_waiting(stage="budget")  # a launch has changed it
        if stage is not None:
            (run_dir / "config.yaml").write_text(f"stage: {stage}\n")
    named = f"trainer.resume_from_path={other / 'global_step_2'}"
    for run_dir, overrides, fix in (
        (own, [f"trainer.default_local_dir={own}"], "set trainer.experiment_name to a new name"),
        (other, [f"trainer.default_local_dir={tmp_path / 'new'}", named], "set trainer.resume_from_path=null"),
    ):
        config = config_of(recipe, *overrides)
        if remedy is None:
            check_resumed_stage(config)
            continue
        says = re.escape(f"{run_dir}/global_step_2 is a checkpoint of the stage {stage}, which the stage budget cannot")
        with pytest.raises(UserError, match=f"{says} resume; {fix}.*{remedy.replace('RUN', str(run_dir))}$"):
            check_resumed_stage(config)
        check_resumed_stage(config_of(recipe, *overrides, "trainer.resume_mode=disable"))


def test_language_models_resume_from_each_other_in_another_run(tmp_path: Path) -> None:
    for stage in ("sft", "vlm_sft"):
        (tmp_path / stage / "global_step_2").mkdir(parents=True)
        RunRecord(tmp_path / stage).mark_waiting(stage=stage)
    new = f"trainer.default_local_dir={tmp_path / 'new'}"
    check_resumed_stage(load_config("grpo", [new, f"trainer.resume_from_path={tmp_path / 'sft/global_step_2'}"]))
    with pytest.raises(UserError, match="is a checkpoint of the stage vlm_sft"):
        check_resumed_stage(
            load_config("grpo", [new, f"trainer.resume_from_path={tmp_path / 'vlm_sft/global_step_2'}"])
        )
    with pytest.raises(UserError, match=f"model.partial_pretrain={tmp_path}/sft/global_step_N/huggingface"):
        check_resumed_stage(load_config("grpo", [f"trainer.default_local_dir={tmp_path / 'sft'}"]))


def test_weights_of_another_size_are_rejected(recipe: Path, tmp_path: Path) -> None:
    controller, wider = (BudgetController(BudgetControllerConfig(**SIZES, hidden=hidden)) for hidden in (8, 16))
    wider.save_pretrained(tmp_path / "wider")
    with pytest.raises(
        UserError, match=r"of this size \(it has the shape \(16, 8\) instead of \(8, 8\) in projections.vision.1.weight"
    ):
        load_weights(controller, tmp_path / "wider")


def test_paths_without_controller_are_rejected(recipe: Path, tmp_path: Path) -> None:
    controller = BudgetController(BudgetControllerConfig(**SIZES, hidden=8))
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "qwen3_vl"}')
    with pytest.raises(UserError, match="init_from=.*/model cannot be used: .*/model has no export of a budget contr"):
        load_weights(controller, tmp_path / "model")
    torch.save({"weights": {}}, tmp_path / "other.pt")
    damaged = {name: tensor.fill_(math.nan) for name, tensor in controller.state_dict().items()}
    save_weights([tmp_path / "nan.pt"], damaged, {})
    for path, why in {
        recipe: "it is damaged, or another kind of file",
        tmp_path / "other.pt": "it has no one_stage_controller_state_dict",
        tmp_path / "nan.pt": "is not finite",
    }.items():
        with pytest.raises(UserError, match=f"init_from={path} is not a budget controller .*{why}") as refused:
            load_weights(controller, path)
        assert "\n" not in str(refused.value) and "this size" not in str(refused.value)


@pytest.mark.parametrize("damage", ["missing", "nan"])
def test_damaged_export_is_not_loaded(damage: str, tmp_path: Path) -> None:
    vlm = {"path": "owner/model", "tier_sizes": [1], "max_new_tokens": 1}
    controller = BudgetController(BudgetControllerConfig(**SIZES, hidden=8, vlm=vlm))
    controller.save_pretrained(tmp_path / "export")
    load_controller(tmp_path / "export")
    file = tmp_path / "export/model.safetensors"
    tensors = load_file(file)
    if damage == "missing":
        del tensors["trunk.2.weight"]
    else:
        tensors["trunk.2.weight"][0, 0] = math.nan
    save_file(tensors, file, {"format": "pt"})
    why = {
        "missing": "lacks 1 of the model's weights, trunk.2.weight among them",
        "nan": "trunk.2.weight is not finite",
    }
    with pytest.raises(UserError, match=why[damage]):
        load_controller(tmp_path / "export")
    with pytest.raises(UserError, match=why[damage]):
        load_weights(controller, tmp_path / "export")


@pytest.mark.parametrize(
    "changes",
    [
        {"tier_sizes": [1, 2]},
        {"tier_sizes": ["1"]},
        {"tier_sizes": 1},
        {"max_new_tokens": "3"},
        {"max_new_tokens": 0},
        {"num_threads": 1.5},
        {"question_suffix": None},
        {"path": None},
        {"fingerprint": 3},
    ],
)
def test_edited_export_is_not_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    vlm = {"path": "owner/model", "tier_sizes": [1], "max_new_tokens": 1, **changes}
    BudgetController(BudgetControllerConfig(**SIZES, hidden=8, vlm=vlm)).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is not an export of a budget controller"):
        load_controller(tmp_path)


def test_controller_of_run_is_found_undamaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = BudgetController(BudgetControllerConfig(**SIZES, hidden=8))
    trained.save_pretrained(tmp_path / "export")
    run = tmp_path / "run"
    for step in (2, 4, 6):
        commit(run, step, tmp_path / "export")
    truncate(run / "global_step_4/huggingface/model.safetensors")
    (run / "global_step_6/manifest.json").unlink()
    save(run, 8)  # as with `export.every`: a configuration, but no weights
    assert find_controller(run).step == 2
    shown = capsys.readouterr().err
    assert "global_step_6 is not complete" in shown and "global_step_4 has no complete huggingface/" in shown
    controller = BudgetController(BudgetControllerConfig(**SIZES, hidden=8))
    load_weights(controller, run)
    assert torch.equal(controller.tier_head.bias, trained.tier_head.bias)
    load_weights(controller, run / "global_step_2")
    flip_byte(run / "global_step_2/huggingface/model.safetensors")
    for path in (run, run / "global_step_2", run / "global_step_2/huggingface"):
        with pytest.raises(UserError, match="global_step_2 is damaged: its file huggingface/model.safetensors has the"):
            find_controller(path)


def test_controller_is_not_accepted_as_model(tmp_path: Path) -> None:
    BudgetController(BudgetControllerConfig(**SIZES, hidden=8)).save_pretrained(tmp_path)
    for load in (lambda: check_model_files(str(tmp_path), False), lambda: load_adapter(str(tmp_path), (1,))):
        with pytest.raises(UserError, match="is a budget controller, not a language or vision-language model"):
            load()


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, None),
        ({"high_ms": 2.05}, None),
        ({"high_ms": 3.0}, "was trained for budgets from 1.0 to 3.0 ms instead of 1.0 to 2.0 ms"),
        ({"vlm": {"fingerprint": "2:b:0", "path": "else"}}, "for another vision-language model or dtype (else)"),
    ],
)
def test_weights_trained_for_another_model_or_budget_cause_warning(
    changes: dict[str, Any], warning: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {**SIZES, "hidden": 8, "vlm": {"fingerprint": "2:a:0", "path": "here"}}
    controller, other = (BudgetController(BudgetControllerConfig(**each)) for each in (own, {**own, **changes}))
    other.save_pretrained(tmp_path / "export")
    save_weights([tmp_path / "best_model.pt"], other.state_dict(), {"config": other.config.to_dict()})
    for name in ("export", "best_model.pt"):
        load_weights(controller, tmp_path / name)
        shown = capsys.readouterr().err
        assert warning in shown if warning else "warning" not in shown


def test_weights_of_best_model_and_export_are_loaded(tmp_path: Path) -> None:
    trained = BudgetController(BudgetControllerConfig(**SIZES, hidden=8))
    for parameter in trained.parameters():
        torch.nn.init.normal_(parameter)
    save_weights([tmp_path / "best_model.pt"], trained.state_dict(), {"epoch": 3})
    trained.save_pretrained(tmp_path / "huggingface")
    for source in (tmp_path / "best_model.pt", tmp_path / "huggingface"):
        controller = BudgetController(BudgetControllerConfig(**SIZES, hidden=8))
        load_weights(controller, source)
        for name, tensor in controller.state_dict().items():
            assert torch.equal(tensor, trained.state_dict()[name]), name


def test_epoch_row_has_mean_and_std_over_samples() -> None:
    sums = EpochSums()
    rewards, losses = [[1.0, 2.0, 6.0], [3.0]], [0.5, 1.5]
    for loss, values in zip(losses, rewards):
        mean = sum(values) / len(values)
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        spread = {
            f"{name}_{statistic}": number
            for name in ("reward", "accuracy", "latency")
            for statistic, number in (("mean", mean), ("std", std))
        }
        sums.add(len(values), {**spread, "budget_violation_rate": 1.0 if len(values) == 1 else 0.0}, loss)
    row = EpochSums(**vars(sums)).row(7)  # as restored from a checkpoint
    assert tuple(row) == EPOCH_COLUMNS and row["epoch"] == 7 and row["loss"] == 1.0
    assert row["reward_mean"] == pytest.approx(3) and row["reward_std"] == pytest.approx(math.sqrt(3.5))
    assert row["budget_violation_rate"] == 0.25


ROW = dict.fromkeys(EPOCH_COLUMNS, 0.5)


def test_resumed_run_replaces_repeated_epochs(tmp_path: Path) -> None:
    tables = EpochTables(tmp_path)
    for epoch, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):
        tables.log_epoch("Train", {**ROW, "epoch": epoch, "reward_mean": reward})
    lines = (tmp_path / "training_history.csv").read_text().splitlines()
    assert lines[0] == (
        "epoch,loss,reward_mean,reward_std,accuracy_mean,accuracy_std,latency_mean,latency_std,budget_violation_rate"
    )
    assert [line.split(",")[:3] for line in lines[1:]] == [["1", "0.5", "0.1"], ["2", "0.5", "0.4"]]
    assert not (tmp_path / "validation_history.csv").exists()


def test_row_with_nan_loss_omits_loss() -> None:
    row = {**ROW, "epoch": 3, "loss": math.nan}
    assert "Val/Loss" not in epoch_tags("Val", row) and epoch_tags("Val", row)["Val/Budget_Violation_Rate"] == 0.5
    assert epoch_line("Val", row).startswith("Val epoch 3: reward 0.5000 (std 0.5000), accuracy ")
    assert epoch_tags("Train", ROW)["Train/Loss"] == 0.5
    assert all(lookup_metric(tag) for tag in epoch_tags("Train", ROW))


def test_log_file_has_console_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # two attempts
        log = LogFileSink(tmp_path / "train.log", total_steps=9, log_every=1)
        log.log_row(MetricsRow(1, 1, 0.0, {"train/loss": 0.25, "train/reward_total_mean": 0.5}))
        log.log_epoch("Train", {**ROW, "epoch": 1})
        log.close()
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert len(lines) == 4 and lines[0].endswith(" - INFO - step 1/9 | loss 0.2500 | reward 0.500")
    assert "Train epoch 1: loss 0.5000" in lines[1] and capsys.readouterr().out == ""


@pytest.mark.parametrize("level", [0.3, -0.3])
def test_plateau_scheduler_reacts_only_to_validation(level: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = PlateauScheduler(optimizer, factor=0.5, patience=1)
    for _ in range(10):
        schedule.step()
    assert schedule.get_last_lr() == [1.0]
    for reward in (level, level, level):
        schedule.step(reward)
    assert schedule.get_last_lr() == [0.5]
    resumed = PlateauScheduler(optimizer, factor=0.5, patience=1)
    resumed.load_state_dict(schedule.state_dict())
    for reward in (level - 0.1, level + 0.1, level + 0.1):
        resumed.step(reward)
    assert resumed.get_last_lr() == [0.5] and resumed.best == level + 0.1


def test_changed_plateau_settings_apply_after_resume() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    former = PlateauScheduler(optimizer, factor=0.5, patience=5)
    for reward in (0.3, 0.2):
        former.step(reward)
    resumed = PlateauScheduler(optimizer, factor=0.1, patience=1)
    resumed.load_state_dict(former.state_dict())
    assert (resumed.best, resumed.num_bad_epochs) == (0.3, 1)
    resumed.step(0.2)
    assert resumed.get_last_lr() == [0.1]


def test_changed_learning_rate_is_named_without_effect(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"trainer.default_local_dir={tmp_path / 'run'}", "optim.plateau_patience=3"
    save(tmp_path / "run", 2)
    (tmp_path / "run/config.yaml").write_text(json.dumps(as_dict(config_of(recipe, *words))))
    print_changes(config_of(recipe, words[0], "optim.lr=0.5", "optim.plateau_patience=4"))
    assert capsys.readouterr().out == (
        "Resuming with changed settings: optim.lr: 0.0001 -> 0.5 (no effect: the saved learning rate applies), "
        "optim.plateau_patience: 3 -> 4.\n"
    )
