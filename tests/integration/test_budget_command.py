"""`run_grpo.sh` with a recipe of the stage budget: its files, resume after a kill in an epoch, two ranks, bad input."""

from __future__ import annotations

import csv
import json
import re
import shutil
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers import ROOT
from tests.helpers.commands import Hold, RecipeRun, TrainingRun, kill_launcher

if TYPE_CHECKING:
    import torch

NUM_EPOCHS, STEPS_PER_EPOCH, GROUP = 2, 4, 3


def budget_run_of(inputs: Path, run_dir: Path, *overrides: str, num_ranks: int = 1, cold: bool = False) -> RecipeRun:
    """The command with the recipe of `budget_inputs`."""
    return RecipeRun("run_grpo.sh", inputs / "recipe.yaml", run_dir, *overrides, num_ranks=num_ranks, cold=cold)


def learned(run: TrainingRun) -> dict[tuple[int, str], float]:
    """The metrics of each step's last row that are independent of the machine's speed."""
    found: dict[tuple[int, str], float] = {}
    for row in run.rows():
        found |= {(row["step"], name): value for name, value in row.items() if name.startswith(("train/", "eval/"))}
    return found


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    import torch

    return torch.load(path, weights_only=True)["one_stage_controller_state_dict"]


def table(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


def test_epochs_are_logged_to_tables_console_and_tensorboard(budget_run: RecipeRun, shared: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from verl_ext.metrics.csv_tables import EPOCH_COLUMNS

    run_dir, printed = budget_run.run_dir, (shared / "budget_run.out").read_text()
    metrics = learned(budget_run)
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    for kind, name in {"Train": "training_history.csv", "Val": "validation_history.csv"}.items():
        rows = table(run_dir / name)
        assert [row["epoch"] for row in rows] == ["1", "2"] and all(tuple(row) == EPOCH_COLUMNS for row in rows)
        for tag in ("Reward_Mean", "Reward_Std", "Accuracy_Mean", "Latency_Mean", "Budget_Violation_Rate"):
            shown = [event.value for event in events.Scalars(f"{kind}/{tag}")]
            assert shown == pytest.approx([float(row[tag.lower()]) for row in rows], rel=1e-5)
        for row in rows:
            line = f"{kind} epoch {row['epoch']}: "
            assert line in printed and line in (run_dir / "train.log").read_text()
            [of_epoch] = [each for each in printed.splitlines() if each.startswith(line)]
            assert (row["loss"] == "nan") == (kind == "Val")
            assert (
                f"{float(row['latency_mean']):.2f} ms" in of_epoch and f"{float(row['latency_std']):.2f} ms" in of_epoch
            )
    loaded = "Loaded 8 training and 4 validation samples."
    assert loaded in printed.splitlines() and loaded in (run_dir / "train.log").read_text()
    last = NUM_EPOCHS * STEPS_PER_EPOCH
    assert f"| reward {metrics[last, 'train/reward_total_mean']:.3f} | acc " in printed
    training = table(run_dir / "training_history.csv")
    for epoch in range(NUM_EPOCHS):
        steps = range(1 + epoch * STEPS_PER_EPOCH, 1 + (epoch + 1) * STEPS_PER_EPOCH)
        same = {"loss": "loss", "reward_mean": "reward_total_mean", "latency_mean": "latency_ms_mean"}
        for column, metric in same.items():
            mean = sum(metrics[step, f"train/{metric}"] for step in steps) / STEPS_PER_EPOCH
            assert float(training[epoch][column]) == pytest.approx(mean, rel=1e-6)
    assert len({row["reward_mean"] for row in training}) == NUM_EPOCHS


def test_reward_terms_are_logged(budget_run: RecipeRun) -> None:
    metrics = learned(budget_run)
    parts = ("accuracy", "latency", "violation", "complexity", "efficiency")
    for step in range(1, 1 + NUM_EPOCHS * STEPS_PER_EPOCH):
        total = sum(metrics[step, f"train/reward_{part}_mean"] for part in parts)
        assert metrics[step, "train/reward_total_mean"] == pytest.approx(total, abs=1e-9)
        assert metrics[step, "train/num_groups"] == 2
        assert metrics[step, "train/num_configs"] == 2 * GROUP and 60 <= metrics[step, "train/budget_ms_mean"] <= 200
        # dropout is on in the update, but off when configurations are sampled
        assert metrics[step, "train/ratio_deviation_max"] < 0.01 and metrics[step, "train/grad_norm"] > 0
    rows = [row for row in budget_run.rows() if "train/loss" in row]
    assert len(rows) == NUM_EPOCHS * STEPS_PER_EPOCH
    for row in rows:
        rate = row["train/num_configs"] / row["time/train/step_s"]
        assert row["throughput/train/configs_per_s"] == pytest.approx(rate)
        assert 0 <= row["throughput/train/cache_hit_rate"] <= 1


def test_weights_of_each_epoch_can_be_loaded(budget_run: RecipeRun) -> None:
    import torch

    from verl_ext.controller.vlm import fingerprint, load_adapter, load_controller

    run_dir = budget_run.run_dir
    rewards = [float(row["reward_mean"]) for row in table(run_dir / "validation_history.csv")]
    best = torch.load(run_dir / "best_model.pt", weights_only=True)
    assert best["epoch"] == 1 + rewards.index(max(rewards)) and best["val_reward"] == pytest.approx(max(rewards))
    controller, controlled = load_controller(run_dir / f"global_step_{NUM_EPOCHS * STEPS_PER_EPOCH}" / "huggingface")
    last = weights_of(run_dir / f"checkpoint_epoch_{NUM_EPOCHS}.pt")
    assert controller.state_dict().keys() == last.keys()
    assert all(torch.equal(tensor, last[name]) for name, tensor in controller.state_dict().items())
    first = weights_of(run_dir / "checkpoint_epoch_1.pt")
    assert any(not torch.equal(tensor, first[name]) for name, tensor in last.items())
    assert controlled.max_new_tokens == 3
    assert controlled.fingerprint == fingerprint(load_adapter(controlled.path, (256,)).model)


def test_run_starts_from_controller_of_another_run(budget_inputs: Path, budget_run: RecipeRun, tmp_path: Path) -> None:
    best = budget_run.run_dir / "best_model.pt"
    run = budget_run_of(
        budget_inputs, tmp_path / "run", f"controller.init_from={best}", "optim.lr=1e-12", "trainer.total_epochs=1"
    )
    run.finish()
    expected, found = weights_of(best), weights_of(run.run_dir / "checkpoint_epoch_1.pt")
    assert max(float((tensor - expected[name]).abs().max()) for name, tensor in found.items()) < 1e-8


def test_rewards_with_another_budget_are_not_comparable(
    budget_inputs: Path, budget_run: RecipeRun, tmp_path: Path
) -> None:
    import torch

    shutil.copytree(budget_run.run_dir, tmp_path / "run")
    epochs = f"trainer.total_epochs={NUM_EPOCHS + 1}"
    done = budget_run_of(budget_inputs, tmp_path / "run", epochs, "controller.budgets_ms=[55.0,60.0]").finish()
    says = f"rewards before and after step {NUM_EPOCHS * STEPS_PER_EPOCH} are not comparable"
    assert says in done.stdout + done.stderr
    former, last = (torch.load(each / "best_model.pt") for each in (budget_run.run_dir, tmp_path / "run"))
    assert last["val_reward"] < former["val_reward"] and last["epoch"] == NUM_EPOCHS + 1


def test_example_in_controller_docs_answers_question(
    budget_inputs: Path, budget_run: RecipeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python example of docs/guides/controller.md."""
    [text] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/controller.md").read_text(), re.DOTALL)
    text = text.replace("checkpoints/rlvr_coding_model/controller_quickstart", str(budget_run.run_dir))
    text = text.replace("data/vqa/questions", str(budget_inputs / "questions"))
    exec(text, {})  # noqa: S102
    assert "Configuration(tier=" in capsys.readouterr().out


def test_run_killed_within_epoch_resumes_exactly(budget_inputs: Path, budget_run: RecipeRun, tmp_path: Path) -> None:
    """Killed in the second epoch, before the save of step 7."""
    import torch

    run, killed_at = budget_run_of(budget_inputs, tmp_path / "run"), STEPS_PER_EPOCH + 3
    (hold := tmp_path / "hold").mkdir()
    before_the_save = Hold("verl_ext.checkpoint.save", "CheckpointWriter.prepare", f"global_step_{killed_at}")
    with run.held(before_the_save, hold, "trainer.save_freq=1") as held:
        kill_launcher(held.process)
    assert f"Found checkpoint: {run.run_dir}/global_step_{killed_at - 1}\n" in run.finish().stdout
    assert learned(run) == learned(budget_run)
    for name in ("training_history.csv", "validation_history.csv"):
        assert (run.run_dir / name).read_text() == (budget_run.run_dir / name).read_text()
    for name in ("best_model.pt", "checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"):
        expected = weights_of(budget_run.run_dir / name)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights_of(run.run_dir / name).items())


def test_two_ranks_learn_the_same_as_one(budget_inputs: Path, tmp_path: Path) -> None:
    import torch

    # with Adam's default epsilon, a gradient of rounding errors alone moves a weight as far as any other gradient
    same = ("controller.dropout=0", "trainer.total_epochs=1", "optim.override_optimizer_config={eps: 1e-3}")
    one, two = (budget_run_of(budget_inputs, tmp_path / str(n), *same, num_ranks=n) for n in (1, 2))
    for run in (one, two):
        run.finish()
    expected, found = learned(one), learned(two)
    assert expected.keys() == found.keys() and len(expected) > 100
    assert [name for name, value in expected.items() if found[name] != pytest.approx(value, rel=1e-5, abs=1e-6)] == []
    weights = weights_of(two.run_dir / "checkpoint_epoch_1.pt")
    for name, tensor in weights_of(one.run_dir / "checkpoint_epoch_1.pt").items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-6)


def test_latency_model_is_fitted_and_budgets_are_shares_of_it(budget_inputs: Path, tmp_path: Path) -> None:
    """Without `latency.file` the run fits a latency model; `budgets_of_full` are fractions of the full model's latency.

    The shares are above 1, because the cheapest configuration of so small a model may take nearly as long as all of it.
    """
    import torch

    from verl_ext.controller.latency import ModeledLatency
    from verl_ext.controller.scoring import soft_accuracy
    from verl_ext.controller.vlm import load_controller
    from verl_ext.data.config import QuestionSource
    from verl_ext.data.image_questions import ImageQuestionDataset

    overrides = ("latency.file=null", "latency.configurations=10", "latency.repeats=1")
    overrides += ("controller.budgets_of_full=[1.5,3.0]", "trainer.total_training_steps=1")
    overrides += ("trainer.log_samples_every=1", "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    run = budget_run_of(budget_inputs, tmp_path / "run", *overrides)
    printed = run.finish().stdout
    controller, controlled = load_controller(run.run_dir / "global_step_1" / "huggingface")
    runner = controlled.runner("cpu", torch.float32)
    latency = ModeledLatency.load(run.run_dir / "latency_model.json", runner.adapter)
    [line] = [line for line in printed.splitlines() if "R squared" in line]
    assert f"{latency.model.r2:.3f}" in line
    source = {"tiny": QuestionSource(source=str(budget_inputs / "questions"))}
    runs = [runner.run(each, controller.space.full) for each in ImageQuestionDataset(source, "train").samples]
    full_ms = statistics.fmean(map(latency.run_ms, runs))
    assert (controller.config.low_ms, controller.config.high_ms) == pytest.approx((1.5 * full_ms, 3.0 * full_ms))
    rows = [json.loads(line) for line in (run.run_dir / "samples.jsonl").read_text().splitlines()]
    assert [row["split"] for row in rows].count("train") == 2 * GROUP
    assert {"budget_ms", "tier", "blocks", "accuracy", "latency_ms"} <= rows[0].keys()
    for row in rows:  # what the advice of the rule accuracy_zero asks for
        assert row["metric"] == "vqa"
        assert row["accuracy"] == soft_accuracy(row["answer"], json.loads(row["references"]))


def test_rejects_budgets_that_no_configuration_meets(budget_inputs: Path, tmp_path: Path) -> None:
    """The ranks detect this after running the model. Starts cold."""
    done = budget_run_of(budget_inputs, tmp_path / "run", "controller.budgets_ms=[5,90]", cold=True).start()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "controller.budgets_ms" in error and "5 ms" in error
    [warning] = [line for line in done.stderr.splitlines() if "latency model" in line]
    assert warning.startswith("warning: ") and "'none'" in warning, "the machine in latency.file"


def test_rejects_latency_model_of_another_model(budget_inputs: Path, tmp_path: Path) -> None:
    """Rank 0 reads the file first, and every rank exits with its error."""
    other = json.loads((budget_inputs / "latency.json").read_text()) | {"model": "another"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    run = budget_run_of(budget_inputs, tmp_path / "run", f"latency.file={tmp_path}/other.json", num_ranks=2)
    done = run.start()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stdout + done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"{tmp_path}/other.json" in error and "another model" in error
