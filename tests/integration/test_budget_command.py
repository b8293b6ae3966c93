"""`run_grpo.sh` with a recipe of the stage budget: what it writes, a kill in the middle of an epoch, bad input."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers import ROOT
from tests.helpers.data import write_questions
from tests.helpers.processes import family_of
from tests.helpers.vlms import write_model
from verl_ext.controller.controlled import load_controller
from verl_ext.controller.latency_model import FEATURES, LatencyModel
from verl_ext.controller.latency_source import ModelledLatency
from verl_ext.controller.loading import fingerprint, load_adapter
from verl_ext.data.question_sources import QuestionSource
from verl_ext.data.questions import QuestionDataset
from verl_ext.metrics.epoch_history import COLUMNS
from verl_ext.metrics.jsonl import read_metrics

TIMEOUT_S = 300
NUM_EPOCHS, STEPS_PER_EPOCH, GROUP = 2, 4, 3
RECIPE = """
# a tiny model
stage: budget
data: {{train_batch_size: 2, datasets: {{tiny: {{source: {questions}}}}}}}
model: {{partial_pretrain: {model}}}
rollout: {{n: 3}}
controller:
  budgets_ms: [60.0, 200.0]
  tier_sizes: [256, 1024, 4096]
  min_active: 2
  max_active: 4
  topk_choices: [1, 2, 4]
  max_new_tokens: 3
latency: {{file: {latency}}}
trainer: {{project_name: p, experiment_name: tiny, total_epochs: 2, logger: [console, tensorboard], log_every: 1}}
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`recipe.yaml`, with the questions, the model and the latency model that it names."""
    directory = tmp_path_factory.mktemp("inputs")
    model, questions = write_model(directory / "model"), write_questions(directory / "questions", 8, 4)
    name = fingerprint(load_adapter(str(model), (256,)).model)
    # dearer with each block and patch, so that choices differ in what they are worth
    weights = {"blocks": 5.0, "experts": 1.0, "patches": 0.5}
    coefficients = {part: {key: weights.get(key, 0.0) for key in keys} for part, keys in FEATURES.items()}
    LatencyModel(coefficients, 1.0, "none", name).save(directory / "latency.json")
    text = RECIPE.format(questions=questions, model=model, latency=directory / "latency.json")
    (directory / "recipe.yaml").write_text(text)
    return directory


def command(inputs: Path, run_dir: Path, *overrides: str, ranks: int = 1) -> list[str]:
    return [
        *("bash", str(ROOT / "run_grpo.sh"), str(ranks), f"recipe={inputs / 'recipe.yaml'}"),
        *(f"trainer.default_local_dir={run_dir}", *overrides),
    ]


ENVIRONMENT = {**os.environ, "VERL_EXT_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def run(inputs: Path, run_dir: Path, *overrides: str, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    words = command(inputs, run_dir, *overrides, ranks=ranks)
    return subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S)


def learnt(run_dir: Path) -> dict[tuple[int, str], float]:
    """What each step's last row says of learning, without what the machine's speed has a part in."""
    found: dict[tuple[int, str], float] = {}
    for row in read_metrics(run_dir / "metrics.jsonl"):
        found |= {(row["step"], name): value for name, value in row.items() if name.startswith(("train/", "eval/"))}
    return found


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return torch.load(path, weights_only=True)["one_stage_controller_state_dict"]


def table(path: Path) -> list[dict[str, str]]:
    with open(path) as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run's directory, and what it said."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    done = run(inputs, run_dir, "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]")
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir, done.stdout


def test_an_epoch_is_told_everywhere(undisturbed: tuple[Path, str]) -> None:
    run_dir, said = undisturbed
    metrics = learnt(run_dir)
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    for kind, name in {"Train": "training_history.csv", "Val": "validation_history.csv"}.items():
        rows = table(run_dir / name)
        assert [row["epoch"] for row in rows] == ["1", "2"] and all(tuple(row) == COLUMNS for row in rows)
        for tag in ("Reward_Mean", "Reward_Std", "Accuracy_Mean", "Latency_Mean", "Budget_Violation_Rate"):
            shown = [event.value for event in events.Scalars(f"{kind}/{tag}")]
            assert shown == pytest.approx([float(row[tag.lower()]) for row in rows], rel=1e-5)
        for row in rows:
            line = f"{kind} epoch {row['epoch']}: "
            assert line in said and line in (run_dir / "train.log").read_text()
            assert f"latency {float(row['latency_mean']):.2f} ms (std {float(row['latency_std']):.2f} ms)" in said
    training = table(run_dir / "training_history.csv")
    for epoch in range(NUM_EPOCHS):
        steps = range(1 + epoch * STEPS_PER_EPOCH, 1 + (epoch + 1) * STEPS_PER_EPOCH)
        same = {"loss": "loss", "reward_mean": "reward_total_mean", "latency_mean": "latency_ms_mean"}
        for column, metric in same.items():
            mean = sum(metrics[step, f"train/{metric}"] for step in steps) / STEPS_PER_EPOCH
            assert float(training[epoch][column]) == pytest.approx(mean, rel=1e-6)
    assert len({row["reward_mean"] for row in training}) == NUM_EPOCHS


def test_every_part_of_the_reward_is_told(undisturbed: tuple[Path, str]) -> None:
    metrics = learnt(undisturbed[0])
    parts = ("accuracy", "latency", "violation", "complexity", "efficiency")
    for step in range(1, 1 + NUM_EPOCHS * STEPS_PER_EPOCH):
        total = sum(metrics[step, f"train/reward_{part}_mean"] for part in parts)
        assert metrics[step, "train/reward_total_mean"] == pytest.approx(total, abs=1e-9)
        assert metrics[step, "train/num_configs"] == 2 * GROUP and 60 <= metrics[step, "train/budget_ms_mean"] <= 200
        assert metrics[step, "train/ratio_deviation_max"] < 1e-6 and metrics[step, "train/grad_norm"] > 0
    rows = [row for row in read_metrics(undisturbed[0] / "metrics.jsonl") if "train/loss" in row]
    for row in rows:
        rate = row["train/num_configs"] / row["time/train/step_s"]
        assert row["throughput/train/configs_per_s"] == pytest.approx(rate)
        assert 0 <= row["throughput/train/cache_hit_rate"] <= 1


def test_the_weights_of_each_epoch_can_be_loaded_by_name(undisturbed: tuple[Path, str]) -> None:
    run_dir, _ = undisturbed
    rewards = [float(row["reward_mean"]) for row in table(run_dir / "validation_history.csv")]
    best = torch.load(run_dir / "best_model.pt", weights_only=True)
    assert best["epoch"] == 1 + rewards.index(max(rewards)) and best["val_reward"] == pytest.approx(max(rewards))
    controller, controlled = load_controller(run_dir / f"global_step_{NUM_EPOCHS * STEPS_PER_EPOCH}" / "huggingface")
    last = weights_of(run_dir / f"checkpoint_epoch_{NUM_EPOCHS}.pt")
    assert controller.state_dict().keys() == last.keys()
    assert all(torch.equal(tensor, last[name]) for name, tensor in controller.state_dict().items())
    first = weights_of(run_dir / "checkpoint_epoch_1.pt")
    assert any(not torch.equal(tensor, first[name]) for name, tensor in last.items())
    assert controlled.max_new_tokens == 3 and fingerprint(load_adapter(controlled.path, (256,)).model)


def test_a_run_that_was_killed_in_an_epoch_goes_on_as_if_it_had_not_been(
    inputs: Path, undisturbed: tuple[Path, str], tmp_path: Path
) -> None:
    words = command(inputs, tmp_path / "run", "trainer.save_freq=1")
    process = subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + TIMEOUT_S
    while not (tmp_path / "run" / f"global_step_{STEPS_PER_EPOCH + 2}").is_dir():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    ranks = family_of(process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    _, left = psutil.wait_procs(ranks, timeout=60)
    assert not left
    done = run(inputs, tmp_path / "run")
    assert done.returncode == 0 and "Found checkpoint" in done.stdout, done.stdout + done.stderr
    assert learnt(tmp_path / "run") == learnt(undisturbed[0])
    for name in ("training_history.csv", "validation_history.csv"):
        assert (tmp_path / "run" / name).read_text() == (undisturbed[0] / name).read_text()
    for name in ("best_model.pt", "checkpoint_epoch_1.pt", "checkpoint_epoch_2.pt"):
        theirs = weights_of(undisturbed[0] / name)
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in weights_of(tmp_path / "run" / name).items())


def test_two_ranks_learn_what_one_does(inputs: Path, tmp_path: Path) -> None:
    found: list[Any] = []
    # with Adam's own epsilon a gradient of nothing but rounding moves a weight as far as any other
    same = "controller.dropout=0", "trainer.total_epochs=1", "optim.override_optimizer_config={eps: 1e-3}"
    for ranks in (1, 2):
        done = run(inputs, tmp_path / str(ranks), *same, ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append((learnt(tmp_path / str(ranks)), weights_of(tmp_path / str(ranks) / "checkpoint_epoch_1.pt")))
    (one, one_weights), (two, two_weights) = found
    assert one.keys() == two.keys() and len(one) > 100
    assert [name for name, value in one.items() if two[name] != pytest.approx(value, rel=1e-5, abs=1e-6)] == []
    for name, tensor in one_weights.items():
        torch.testing.assert_close(two_weights[name], tensor, rtol=1e-4, atol=1e-6)


def test_budgets_can_be_shares_of_all_of_the_model(inputs: Path, tmp_path: Path) -> None:
    shares = "controller.budgets_of_full=[0.5,1.5]"
    files = "trainer.total_training_steps=1", "trainer.checkpoint.save_contents=[model,optimizer,extra,hf_model]"
    assert run(inputs, tmp_path / "run", shares, *files).returncode == 0
    controller, controlled = load_controller(tmp_path / "run" / "global_step_1" / "huggingface")
    source = {"tiny": QuestionSource(source=str(inputs / "questions"))}
    latency = ModelledLatency.load(inputs / "latency.json", controlled.load("cpu", torch.float32))
    executor = controlled.executor("cpu", torch.float32)
    runs = [executor.run(each, controller.space.full) for each in QuestionDataset(source, "train").samples]
    full_ms = statistics.fmean(map(latency.of_run, runs))
    assert (controller.config.low_ms, controller.config.high_ms) == pytest.approx((0.5 * full_ms, 1.5 * full_ms))


def test_a_latency_model_is_made_where_none_is_given(inputs: Path, tmp_path: Path) -> None:
    overrides = ["latency.file=null", "latency.configurations=10", "latency.repeats=1"]
    overrides += ["controller.budgets_ms=[1e5,1e6]", "trainer.total_training_steps=1", "trainer.log_samples_every=1"]
    done = run(inputs, tmp_path / "run", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    made = LatencyModel.load(tmp_path / "run" / "latency_model.json")
    assert f"R squared {made.r2:.3f}" in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * GROUP and {"budget_ms", "tier", "blocks", "accuracy", "latency_ms"} <= rows[0].keys()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["controller.budgets_ms=[5,90]"], "begins at 5 ms, but the cheapest configuration takes "),
        (["controller.topk_choices=[1,2]"], "must end with 4"),
        (["controller.importance_file={inputs}/other.json"], "is of another model"),
        (["latency.file={inputs}/latency_of_another.json"], "was fitted on another model"),
        (["controller.init_from={inputs}/latency.json"], "is no controller of this size"),
        (["data.train_batch_size=50"], "there are 8 questions to learn from"),
    ],
)
def test_bad_input_is_one_sentence_from_the_ranks(
    overrides: list[str], message: str, inputs: Path, tmp_path: Path
) -> None:
    (inputs / "other.json").write_text(json.dumps({str(block): 1.0 for block in range(1, 9)}))
    other = json.loads((inputs / "latency.json").read_text()) | {"model": "another"}
    (inputs / "latency_of_another.json").write_text(json.dumps(other))
    done = run(inputs, tmp_path / "run", *(text.format(inputs=inputs) for text in overrides))
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
