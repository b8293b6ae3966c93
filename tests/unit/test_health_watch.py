"""Health rules in the training loop: new findings, stopping a run, and rejected settings."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verl_ext.config.run_config import NOT_MEASURED, TRAINING_DATA, changes_validation
from verl_ext.config.schema import keys
from verl_ext.errors import UserError
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import LRSchedule, RunContext, comparable_from, configured_at
from verl_ext.health.history import MetricHistory
from verl_ext.health.rule import Finding, HealthView, Level, Rule, warning
from verl_ext.health.rules import RULES
from verl_ext.health.watch import CLEAR_CHECKS, HealthMonitor, reported_levels
from verl_ext.launch.preflight import check_health
from verl_ext.trainer.stages import STAGES, load_config

BY_NAME = {rule.name: rule for rule in RULES}


def view_of(history: MetricHistory | None = None, context: RunContext | None = None) -> HealthView:
    return HealthView(history or MetricHistory(), context or RunContext("sft", 1000), HealthLimits())


def found_by(rule: str, history: MetricHistory, context: RunContext | None = None) -> Finding:
    found = BY_NAME[rule].run(view_of(history, context))
    assert found is not None
    return found


def monitor(
    *stop_on: str, history: MetricHistory | None = None, every: int = 10, reported: dict[str, Level] | None = None
) -> HealthMonitor:
    return HealthMonitor(view_of(history), every, stop_on, reported)


def test_finding_of_discarded_steps_counts_as_not_reported(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    steps = {"grad_norm_range": (1, 10), "loss_not_finite": (1, 30), "overfitting": (2, 40), "lr_schedule": (2, 50)}
    lines = [
        {"step": step, "attempt": attempt, "name": name, "level": "alarm"} for name, (attempt, step) in steps.items()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    attempts = [{"attempt": number, "first_step": step} for number, step in ((1, 0), (2, 20), (3, 40))]
    assert reported_levels(path, 40, attempts) == dict.fromkeys(["grad_norm_range", "overfitting"], Level.ALARM)


def feed(monitor: HealthMonitor, steps: range, **metrics: float) -> list[tuple[int, str, Level]]:
    named = {f"train/{name}": value for name, value in metrics.items()}
    return [(step, each.rule, each.level) for step in steps for each in monitor.check(step, named)]


def test_finding_is_reported_once_and_again_if_worse() -> None:
    health = monitor()
    assert feed(health, range(1, 41), loss=2.0, grad_norm=1.0) == []
    changes = feed(health, range(41, 51), loss=2.0, grad_norm=300.0)
    assert changes == [(50, "grad_norm_range", Level.NOTICE), (50, "grad_norm_exploding", Level.ALARM)]
    changes = feed(health, range(51, 101), loss=2.0, grad_norm=300.0)
    assert changes == [(100, "loss_not_falling", Level.WARNING)]


@pytest.mark.parametrize(("norm", "says"), [(1e-3, "raise optim.lr"), (60.0, "lower optim.lr")])
def test_grad_norm_advice_depends_on_direction(norm: float, says: str) -> None:
    history = MetricHistory()
    for step in range(1, 101):
        history.add(step, {"train/grad_norm": norm})
    found = found_by("grad_norm_range", history)
    assert found.level == Level.NOTICE and says in found.sentence


@pytest.mark.parametrize(
    ("norms", "level", "share"),
    [
        ([300.0] * 8 + [1.0] * 8 + [math.inf] * 4, Level.ALARM, "60%"),
        ([math.nan] * 4 + [300.0] * 6 + [1.0] * 10, Level.ALARM, "50%"),
        ([300.0] * 9 + [1.0] * 16 + [math.inf] * 4, Level.WARNING, "20%"),
        ([1.0] * 30 + [math.inf] * 3, Level.OK, "15%"),
        ([1.0] * 5 + [math.inf] * 20, Level.ALARM, "100%"),
    ],
)
def test_grad_norm_share_counts_window_and_non_finite(norms: list[float], level: Level, share: str) -> None:
    history = MetricHistory()
    for step, norm in enumerate(norms, start=1):
        history.add(step, {"train/grad_norm": norm})
    found = found_by("grad_norm_exploding", history)
    assert found.level == level and found.message.startswith(share)


def test_finding_clears_after_several_clear_checks() -> None:
    health = monitor()
    feed(health, range(1, 41), loss=2.0, grad_norm=1e-4)
    changes = feed(health, range(41, 101), loss=2.0, grad_norm=1.0)
    gone = {rule: step for step, rule, level in changes if level == Level.OK}
    # the median of 20 norms is normal again at step 60, or at step 50 if half of them are
    assert gone["grad_norm_vanishing"] in (50 + 10 * (CLEAR_CHECKS - 1), 60 + 10 * (CLEAR_CHECKS - 1))


def test_non_finite_loss_is_reported_at_once() -> None:
    health = monitor()
    feed(health, range(1, 13), loss=2.0)
    changes = feed(health, range(13, 17), loss=math.nan)
    assert changes == [(13, "loss_not_finite", Level.WARNING), (15, "loss_not_finite", Level.ALARM)]


def test_named_rules_stop_run_above_notice() -> None:
    health = monitor("grad_norm_range", "loss_not_finite")
    feed(health, range(1, 41), loss=2.0, grad_norm=300.0)
    assert health.stop_rule is None
    feed(health, range(41, 42), loss=math.inf)
    assert health.stop_rule == "loss_not_finite"


@pytest.mark.parametrize("was_reported", [True, False])
def test_reported_finding_neither_repeats_nor_stops_resumed_run(was_reported: bool) -> None:
    history = MetricHistory()
    for step in range(1, 37):  # the run was stopped between two checks
        history.add(step, {"train/loss": 2.0, "train/grad_norm": 300.0})
    reported = {"grad_norm_exploding": Level.ALARM, "grad_norm_range": Level.NOTICE} if was_reported else {}
    health = monitor("grad_norm_exploding", history=history, reported=reported)
    found = [rule for _, rule, _ in feed(health, range(37, 61), loss=2.0, grad_norm=300.0)]
    assert found == ([] if was_reported else ["grad_norm_range", "grad_norm_exploding"])
    assert health.stop_rule == (None if was_reported else "grad_norm_exploding")


@pytest.mark.parametrize(
    ("reported", "stops"), [({}, True), ({"demo": Level.NOTICE}, True), ({"demo": Level.ALARM}, False)]
)
def test_run_stops_when_level_rises_not_when_it_falls(reported: dict[str, Level], stops: bool) -> None:
    rule = Rule("demo", lambda view: warning("a finding"), "A finding.", "do something")
    health = HealthMonitor(view_of(), 10, ["demo"], reported, [rule])
    changes = feed(health, range(1, 41), loss=2.0)
    assert [level for _, _, level in changes] == [Level.WARNING]
    assert (health.stop_rule == "demo") == stops


def test_validation_is_checked_when_logged() -> None:
    health = monitor(every=1000)
    for step, loss, val in ((500, 1.2, 1.5), (1000, 0.8, 1.3), (1500, 0.5, 1.4), (2000, 0.3, 1.6)):
        for each in range(step - 499, step + 1):
            health.check(each, {"train/loss": loss + (step - each) / 2000})
        changes = health.check(step, {"val/loss": val})
    [found] = [each for each in changes if each.rule == "overfitting"]
    assert found.level == Level.WARNING and "1.3 at step 1000" in found.message


def test_overfitting_names_checkpoint_to_use() -> None:
    history = MetricHistory()
    for step in range(1, 41):
        history.add(step, {"train/loss": 2 - step / 50})
        if step % 10 == 0:
            history.add(step, {"val/loss": {10: 1.2, 20: 1.0, 30: 1.2, 40: 1.4}[step]})
    found = found_by("overfitting", history, RunContext("sft", 100, checkpoints=lambda: [15, 30, 40]))
    assert found.level == Level.WARNING and found.message.endswith("the checkpoint to use is global_step_15")


@pytest.mark.parametrize("num_steps", [2, 3, 20])
def test_changed_schedule_applies_from_step_of_its_attempt(num_steps: int) -> None:
    history = MetricHistory()
    for step in range(1, 21 + num_steps):
        history.add(step, {"train/lr(1e-3)": 1.0 if step <= 20 else 0.5})
    context = RunContext("sft", 100, LRSchedule(5e-4, "constant", 0, 100))
    assert found_by("lr_schedule", history, context).level == (Level.OK if num_steps == 20 else Level.WARNING)
    attempts = [{"first_step": 0}, {"first_step": 20, "config_changes": {"optim.lr": [1e-3, 5e-4]}}]
    attempts += [{"first_step": 21, "config_changes": {}}, {"first_step": None}]
    found = BY_NAME["lr_schedule"].run(view_of(history, replace(context, configured_at=configured_at(attempts))))
    assert found is None if num_steps < 3 else found is not None and found.level == Level.OK


@pytest.mark.parametrize(
    ("attempts", "first"),
    [
        ([{"first_step": 0}, {"first_step": 4, "config_changes": {"optim.lr": [1, 2]}}], 0),
        ([{"first_step": 0}, {"first_step": 4, "config_changes": {"reward.functions": [["a"], ["b"]]}}], 5),
        ([{"first_step": 0}, {"first_step": 4, "config_changes": {"reward.num_workers": [1, 2]}}], 0),
        ([{"first_step": 0, "input_files": {"r.py": "1"}}, {"first_step": 4, "input_files": {"r.py": "2"}}], 5),
        ([{"first_step": 0}, {"first_step": 4, "input_files": {"r.py": "2"}}], 0),
        (
            [{"first_step": 0}, {"first_step": 9, "config_changes": {"data.val_files": ["a", "b"]}}, {"first_step": 4}],
            5,
        ),
        (
            [{"first_step": 0}, {"first_step": 9, "config_changes": {"data.val_files": ["a", "b"]}}, {"first_step": 0}],
            0,
        ),
        ([{"first_step": 0}, {"first_step": None, "config_changes": {"data.val_files": ["a", "b"]}}], 0),
    ],
)
def test_validations_are_compared_from_last_change_of_what_they_measure(attempts: list[Any], first: int) -> None:
    assert comparable_from(attempts, {}) == first


ON_TRAINING_DATA = {"eval_split": "train", "eval_batches": 2}


@pytest.mark.parametrize(
    ("key", "data", "changes"),
    [
        *((f"data.{key}", {}, True) for key in ("max_length", "truncation", "chat_template", "multiturn.messages_key")),
        *((f"data.{key}", {}, True) for key in ("prompt_key", "datasets.x.val", "question_suffix", "a_new_setting")),
        *((f"data.{key}", ON_TRAINING_DATA, True) for key in ("train_files", "train_batch_size", "train_max_samples")),
        *((f"data.{key}", {}, False) for key in ("train_files", "train_batch_size", "train_max_samples")),
        ("data.train_batch_size", {"eval_batches": -1}, False),
        ("data.micro_batch_size_per_gpu", ON_TRAINING_DATA, False),
        ("latency.percentile", {}, True),
        ("optim.lr", ON_TRAINING_DATA, False),
    ],
)
def test_setting_changes_what_validation_measures(key: str, data: dict[str, Any], changes: bool) -> None:
    assert changes_validation([key], data) == changes


def test_settings_without_effect_on_validation_exist() -> None:
    known = {key for stage in STAGES.values() for key in keys(stage.root)}
    assert {*NOT_MEASURED, *TRAINING_DATA} <= known


def test_fall_at_change_of_rewards_is_no_finding() -> None:
    history = MetricHistory()
    for step, value in ((2, 1.0), (4, 1.01), (6, 0.5), (8, 0.51)):
        history.add(step, {"eval/reward_total_mean": value, "val/loss": 1 / value})
    assert found_by("eval_reward_falling", history, RunContext("grpo", 100)).level == Level.NOTICE
    assert found_by("eval_reward_falling", history, RunContext("grpo", 100, comparable_from=5)).level == Level.OK
    assert found_by("overfitting", history, RunContext("sft", 100)).level == Level.NOTICE
    assert found_by("overfitting", history, RunContext("sft", 100, comparable_from=5)).level == Level.OK


def test_overfitting_reports_best_value_of_latest_validation_once() -> None:
    history = MetricHistory()
    for step, val in ((10, 1.2), (20, 1.0)):
        history.add(step, {"val/loss": val})
    assert found_by("overfitting", history).message == "val/loss is at its best, 1, at step 20"


@pytest.mark.parametrize(
    ("rewards", "level", "says"),
    [
        ([0.2, 0.3, 0.4, 0.5, 0.1, 0.12], Level.NOTICE, "was 0.5 at step 4 and is 0.12 at step 6"),
        ([5.2, 3.0, 9.3, 8.6, 9.7, 8.0, 6.4, 5.9, 5.8], Level.NOTICE, "and is 5.8 at step 9"),
        ([5.2, 3.0, 9.3, 8.6, 9.7, 8.0, 6.4, 5.9, 6.8], Level.OK, r"6\.8 at step 9, not significantly worse \(thresh"),
        ([0.2, 0.5, 0.49, 0.48, 0.47, 0.46], Level.OK, r"not significantly worse \(threshold: 0\.05\)"),
    ],
)
def test_fall_of_evaluation_reward_is_a_notice_if_training_reward_falls(
    rewards: list[float], level: Level, says: str
) -> None:
    """It is significant if it exceeds the noise of single values, or continues."""
    history = MetricHistory()
    for step, reward in enumerate(rewards, 1):
        history.add(step, {"train/reward_total_mean": -step, "eval/reward_total_mean": reward})
    found = found_by("eval_reward_falling", history, RunContext("grpo", 100))
    assert found.level == level and re.search(says, found.message)


@pytest.mark.parametrize(
    ("sizes", "level"),
    [
        ({}, Level.OK),
        ({"eval/total_valid_token_count": 18 * 120.5, "eval/seq_completion_len_mean": 120.5}, Level.OK),
        ({"eval/total_valid_token_count": 1000 * 120.5, "eval/seq_completion_len_mean": 120.5}, Level.NOTICE),
        ({"eval/num_configs": 18}, Level.OK),
        ({"eval/num_configs": 1000}, Level.NOTICE),
    ],
)
def test_fall_of_second_evaluation_reward_must_exceed_sampling_error(sizes: dict[str, float], level: Level) -> None:
    history = MetricHistory()
    for step, reward in ((0, 0.7719), (2, 0.6725)):
        history.add(step, {"eval/reward_total_mean": reward, "eval/reward_total_std": 0.4, **sizes})
    assert found_by("eval_reward_falling", history, RunContext("grpo", 100)).level == level


@pytest.mark.parametrize(
    ("step", "untrained_loss", "level"), [(95, None, Level.NOTICE), (80, None, None), (95, 6.2, None)]
)
def test_final_validation_loss_of_pretrained_weights_has_range(
    step: int, untrained_loss: float | None, level: Level | None
) -> None:
    history = MetricHistory()
    history.add(step, {"val/loss": 4.5})
    view = view_of(history, RunContext("sft", 100, untrained_loss=untrained_loss))
    found = BY_NAME["final_val_loss"].run(view)
    assert (None if found is None else found.level) == level


def test_threshold_is_set_by_name() -> None:
    config = load_config("sft", ["health.limits.grad_norm_alarm=7"])
    assert config.health.limits.grad_norm_alarm == 7.0
    config = load_config("grpo", ["health.limits.reward_milestones=[0, 0.5]", "health.limits.trend_p=0.01"])
    assert (config.health.limits.reward_milestones, config.health.limits.trend_p) == ([0, 0.5], 0.01)
    with pytest.raises(UserError, match="grad_norm_alarmm"):
        load_config("sft", ["health.limits.grad_norm_alarmm=7"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("health.stop_on=[overfiting]", "use overfitting"),
        ("health.stop_on=[violation_high]", "not a rule of this stage"),
        ("health.every=0", "integer of at least 1"),
        ("health.limits.window=300", "from 3 to 256"),
        ("health.limits.grad_norm_alarm=-1", "above 0"),
        ("health.limits.trend_p=0.5", "below 0.5"),
        ("health.limits.reward_milestones=[low]", "list .* numbers"),
    ],
)
def test_invalid_settings_are_rejected(override: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_health(load_config("sft", [override]))
    check_health(load_config("sft", ["health.stop_on=[overfitting, loss_not_finite]"]))


def test_stop_on_needs_health_enabled() -> None:
    with pytest.raises(UserError, match="health.enabled"):
        check_health(load_config("sft", ["health.stop_on=[overfitting]", "health.enabled=false"]))
