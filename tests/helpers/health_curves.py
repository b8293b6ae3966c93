"""Curves of healthy and unhealthy runs, each with exactly the rules that must reach warning or alarm."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from verl_ext.checkpoint.manifest import Manifest
from verl_ext.config.schema import to_yaml
from verl_ext.health.config import HealthLimits
from verl_ext.health.context import LRSchedule, RunContext
from verl_ext.health.history import MetricHistory
from verl_ext.health.rule import HealthView
from verl_ext.trainer.stages import load_config

Rows = list[tuple[int, dict[str, float]]]
PEAK = 1e-5
SAMPLES = 64
"""Completions in a step of the stage grpo."""


@dataclass(frozen=True)
class Curve:
    """A run.

    Attributes:
        name: what happens.
        stage: stage of the run.
        rows: step and metrics, by the number of a seed.
        complaints: rules that must be at warning or alarm at its end.
        limits: thresholds that differ from the defaults.
        untrained_loss: loss of random guessing if the run started from untrained weights.
        notices: rules that must be at notice at its end; others may be too.
    """

    name: str
    stage: str
    rows: Callable[[int], Rows]
    complaints: frozenset[str]
    limits: dict[str, float] = field(default_factory=dict)
    untrained_loss: float | None = None
    notices: frozenset[str] = frozenset()


CURVES: list[Curve] = []
Shape = Callable[[float, np.random.Generator], float]
"""Value by the share of the run that is done."""


def noisy(shape: Callable[[float], float], noise: float = 0.0) -> Shape:
    """A shape with noise that is a share of its value."""
    return lambda share, rng: shape(share) * (1 + noise * rng.standard_normal())


def falling(start: float, end: float, rate: float = 5.0, noise: float = 0.05) -> Shape:
    """An exponential from `start` toward `end`."""
    return noisy(lambda share: end + (start - end) * math.exp(-rate * share), noise)


def flat(value: float, noise: float = 0.05) -> Shape:
    """Constant."""
    return noisy(lambda share: value, noise)


def line(start: float, end: float, noise: float = 0.05) -> Shape:
    """A straight line from `start` to `end`."""
    return noisy(lambda share: start + (end - start) * share, noise)


def from_(share_at: float, before: Shape, after: Shape) -> Shape:
    """One shape up to a share of the run, then another."""
    return lambda share, rng: before(share, rng) if share < share_at else after(share, rng)


def unless_solved(shape: Shape) -> Shape:
    """A shape that is 0 in two of three steps, because all of their prompts are solved."""
    return lambda share, rng: 0.0 if round(300 * share) % 3 else shape(share, rng)


SFT = {
    "train/loss": falling(2.4, 1.1),
    "train/grad_norm": flat(1.2, 0.2),
    "time/train/step_s": flat(2.0),
    "time/train/data_s": flat(0.01),
    "throughput/train/tokens_per_s": flat(9000.0),
}
SFT_VAL = falling(2.3, 1.2, noise=0.003)
GRPO = {
    "train/loss": lambda share, rng: 0.01 * rng.standard_normal(),
    "train/grad_norm": flat(0.4, 0.2),
    "time/train/step_s": flat(20.0, 0.1),
    "time/train/data_s": flat(0.01),
    "throughput/train/valid_tokens_per_s": flat(3000.0, 0.1),
    "train/reward_total_mean": line(0.3, 0.9, 0.1),
    "train/reward_total_std": flat(0.4, 0.1),
    "train/reward_correct_mean": line(0.2, 0.7, 0.1),
    "train/reward_format_mean": line(0.3, 0.5, 0.05),
    "train/adv_mean": lambda share, rng: 1e-9 * rng.standard_normal(),
    "train/adv_std": flat(0.9),
    "train/entropy": line(0.8, 0.4),
    "train/seq_completion_len_mean": line(200, 260),
    "train/seq_prompt_len_max": flat(180, 0.1),
    "train/rollout_logprob_diff_mean": flat(0.01, 0.1),
    "train/reward_failures": flat(0.0),
}
BUDGET = {
    "train/loss": lambda share, rng: -0.05 + 0.1 * rng.standard_normal(),
    "train/grad_norm": flat(0.5, 0.2),
    "time/train/step_s": flat(1.2),
    "time/train/data_s": flat(0.001),
    "throughput/train/configs_per_s": flat(160.0, 0.1),
    "train/reward_total_mean": line(-0.2, 0.4, 0.1),
    "train/reward_total_std": flat(0.5, 0.1),
    "train/accuracy_mean": line(0.15, 0.45, 0.1),
    "train/adv_mean": lambda share, rng: 1e-9 * rng.standard_normal(),
    "train/adv_std": flat(0.3),
    "train/latency_ms_mean": line(240, 200, 0.03),
    "train/budget_ms_mean": flat(275, 0.02),
    "train/budget_violation_mean": falling(0.4, 0.02, 4.0, 0.2),
}
BASES = {"sft": SFT, "grpo": GRPO, "budget": BUDGET}


def add(
    name: str,
    stage: str,
    *complaints: str,
    steps: int = 300,
    epochs: float = 3.0,
    val: Shape | None = None,
    disk: Shape | None = None,
    limits: dict[str, float] | None = None,
    lr: Shape | None = None,
    untrained_loss: float | None = None,
    notices: Iterable[str] = (),
    evaluated: Shape | None = None,
    **changed: Shape,
) -> None:
    """Add a run whose metrics are those of a healthy one except `changed`, by the end of their names."""
    shapes = dict(BASES[stage])
    for end, shape in changed.items():
        [full] = [each for each in shapes if each.endswith(f"/{end}")]
        shapes[full] = shape

    def rows(seed: int) -> Rows:
        rng, found = np.random.default_rng([seed, sum(map(ord, name))]), []
        for step in range(1, steps + 1):
            share = step / steps
            row = {each: float(shape(share, rng)) for each, shape in shapes.items()}
            rate = PEAK if lr is None else lr(share, rng)
            found.append((step, {**row, "train/lr(1e-3)": 1e3 * rate, "train/epoch": share * epochs}))
            if stage == "sft" and step % (steps // 10) == 0:
                found.append((step, {"val/loss": float((val or SFT_VAL)(share, rng))}))
            if evaluated is not None and step % (steps // 20) == 0:
                found.append((step, {"eval/reward_total_mean": float(evaluated(share, rng))}))
            if disk is not None and step % (steps // 10) == 0:
                found.append((step, {"system/disk_free_gib": float(disk(share, rng))}))
        return found

    sick = frozenset(complaints)
    CURVES.append(Curve(name, stage, rows, sick, limits or {}, untrained_loss, frozenset(notices)))


def add_bandit(name: str, stage: str, epochs: int = 16, steps_per_epoch: int = 25) -> None:
    """Add a healthy run whose loss and rewards are those of REINFORCE with an entropy bonus on a small bandit."""
    [base] = [each for each in CURVES if each.name == "a controller learns"]

    def rows(seed: int) -> Rows:
        num_prompts, num_actions, batch, group = 4, 24, 16, 8
        rng, found = np.random.default_rng(seed), []
        quality = rng.normal(0, 0.5, (num_prompts, num_actions))
        logits = np.zeros_like(quality)
        for step in range(1, epochs * steps_per_epoch + 1):
            prompts = rng.integers(num_prompts, size=(batch, 1))
            log_p = logits[prompts] - np.log(np.exp(logits[prompts]).sum(-1, keepdims=True))  # (batch, 1, actions)
            actions = (log_p + rng.gumbel(size=(batch, group, num_actions))).argmax(-1)
            rewards = quality[prompts, actions] + 0.3 * rng.normal(size=actions.shape)
            advantages = rewards - rewards.mean(1, keepdims=True)
            entropy = -(np.exp(log_p) * log_p).sum(-1, keepdims=True)
            gradient = np.zeros_like(logits)
            np.add.at(gradient, (prompts, actions), advantages)
            np.add.at(gradient, prompts[:, 0], -0.05 * group * (np.exp(log_p) * (log_p + entropy))[:, 0])
            logits += 2.0 * gradient / actions.size
            metrics = {
                "train/loss": -float((np.take_along_axis(log_p[:, 0], actions, 1) * advantages).mean()),
                "train/reward_total_mean": float(rewards.mean()),
                "train/reward_total_std": float(rewards.std()),
                "train/adv_std": float(advantages.std()),
                "train/epoch": step / steps_per_epoch,
            }
            found.append((step, metrics))
        of_base = [row for _, row in base.rows(seed)]
        return [(step, {**of_base[(step - 1) * len(of_base) // len(found)], **row}) for step, row in found]

    CURVES.append(Curve(name, stage, rows, frozenset()))


NAN: Shape = lambda share, rng: math.nan  # noqa: E731

# Healthy
add("a textbook run", "sft")
add("small batches jitter", "sft", loss=falling(2.4, 1.1, noise=0.2))
add("a plateau after learning", "sft", loss=falling(2.4, 1.1, rate=30))
add("many epochs", "sft", epochs=15)
add("a slow start in the warm-up", "sft", loss=from_(0.1, flat(2.4), falling(2.8, 1.1)))
add("one spike of the loss", "sft", loss=from_(0.5, falling(2.4, 1.1), from_(0.504, flat(6.0), falling(2.4, 1.1))))
add("saves make steps slow now and then", "sft", step_s=lambda share, rng: 2 + 10 * (rng.random() < 0.05))
add("validation wobbles", "sft", val=falling(2.3, 1.2, noise=0.008))
add("batches vary more than the loss falls", "sft", loss=line(1.55, 1.48, 0.25), val=falling(1.66, 1.44, noise=0.003))
add("batches vary more than the loss falls, without validations", "sft", loss=line(1.6, 1.35, 0.15),
    val=flat(1.4, 0.002))  # fmt: skip
add("a plateau of the validation", "sft", val=falling(2.3, 1.2, rate=20, noise=0.002))
add("the loss starts high, not too high", "sft", loss=falling(4.6, 1.1))
add("a long run", "sft", steps=3000)
add("a loss that generalizes may be small", "sft", loss=falling(2.0, 0.02, 9.0), val=falling(2.0, 0.03, 9.0, 0.002))
JUMPING: Shape = lambda share, rng: 9000 * math.exp(rng.normal())  # noqa: E731
add("other programs use the machine for a while", "sft", tokens_per_s=from_(0.4, flat(9000.0),
    from_(0.65, JUMPING, flat(9000.0))))  # fmt: skip
add("steps so short that they measure the machine", "sft", step_s=flat(0.2, 0.3), tokens_per_s=JUMPING)
add("slow for a moment at the end", "sft", step_s=from_(0.96, flat(0.2), flat(1.0)), tokens_per_s=JUMPING)
add("random weights begin at guessing", "sft", loss=falling(6.1, 1.1), untrained_loss=6.2)
add("random weights learn at once", "sft", steps=30, loss=falling(6.0, 0.2, 1.7, 0.02), untrained_loss=6.0)
add("the disk fills slowly", "sft", disk=line(900, 700, 0.0))
add("rotation keeps the disk steady", "sft", disk=flat(40, 0.001))
add("rewards rise", "grpo")
add("a reward fails now and then", "grpo", reward_failures=lambda share, rng: rng.binomial(SAMPLES, 0.01))
add("noisy rewards rise", "grpo", reward_total_mean=line(0.2, 0.8, 0.4))
add("rewards reach their plateau", "grpo", reward_total_mean=noisy(lambda s: 0.9 - 0.7 * math.exp(-9 * s), 0.05))
add("certainty with success", "grpo", entropy=falling(0.8, 0.01, 9.0), steps=400)
add("shorter answers with more reward", "grpo", seq_completion_len_mean=falling(240, 80, 9.0))
add("longer answers take longer", "grpo", seq_completion_len_mean=line(100, 400), step_s=line(10, 20, 0.1))
add("answers become eight times as long", "grpo", step_s=from_(0.5, flat(20.0, 0.1), line(-120.0, 160.0)),
    seq_completion_len_mean=from_(0.5, flat(60.0), line(-360.0, 480.0)))  # fmt: skip
add("rewards rise faster and faster", "grpo", steps=40, reward_total_mean=noisy(lambda s: 0.14 + 0.3 * s**3, 0.02))
add("most prompts are solved", "grpo", loss=unless_solved(BASES["grpo"]["train/loss"]),
    grad_norm=unless_solved(flat(0.4, 0.2)), adv_std=unless_solved(flat(0.3)))  # fmt: skip
add("rare rewards", "grpo", reward_total_mean=lambda share, rng: rng.binomial(32, 0.01) / 32,
    reward_correct_mean=lambda share, rng: rng.binomial(32, 0.02) / 32, reward_format_mean=flat(0.3))  # fmt: skip
add("rare rewards become less rare", "grpo",
    reward_total_mean=lambda share, rng: rng.binomial(32, 0.01 + 0.04 * share) / 32,
    reward_correct_mean=lambda share, rng: rng.binomial(32, 0.01 + 0.04 * share) / 32,
    reward_format_mean=flat(0.3))  # fmt: skip
add("a controller learns", "budget", epochs=30)
add("a controller learns in few epochs", "budget", epochs=7, steps=112)
add_bandit("the loss of a policy rises with the reward", "budget")
add("losses of a policy are of either sign", "budget", epochs=30, loss=lambda share, rng: rng.standard_normal())
add("rewards begin below zero", "budget", epochs=30, reward_total_mean=line(-1.0, 0.3, 0.1))
add("a plateau after learning of a controller", "budget", epochs=60,
    notices=["reward_not_rising", "accuracy_not_rising"],
    reward_total_mean=noisy(lambda s: 0.4 - 0.6 * math.exp(-15 * s), 0.1),
    accuracy_mean=noisy(lambda s: 0.45 - 0.3 * math.exp(-15 * s), 0.1),
    budget_violation_mean=falling(0.4, 0.02, 15.0, 0.2))  # fmt: skip
add("rewards of large weights", "grpo", limits={"reward_max": 200.0, "reward_std_max": 50.0},
    reward_total_mean=flat(50.0, 0.1), reward_total_std=flat(20.0, 0.1))  # fmt: skip
add("an evaluation that wobbles", "grpo", evaluated=lambda share, rng: 0.5 + 0.3 * share + 0.05 * rng.standard_normal())
add("an evaluation that reaches its plateau", "grpo",
    evaluated=lambda share, rng: 0.7 - 0.4 * math.exp(-9 * share) + 0.02 * rng.standard_normal())  # fmt: skip
add("few configurations are over budget", "budget", epochs=30, budget_violation_mean=line(0.005, 0.03, 0.02))

# Loss and validation
add("divergence", "sft", "loss_diverging", loss=from_(0.6, falling(2.4, 1.1), line(-3.0, 4.0)))
add("divergence to nothing", "sft", "loss_not_finite", loss=from_(0.9, falling(2.4, 1.1), NAN))
add("divergence whose noise grows with the loss", "sft", "loss_diverging", "loss_jitter", "final_loss",
    loss=from_(0.8, falling(2.4, 1.1), lambda share, rng: 50 * math.exp(0.7 * rng.standard_normal())))  # fmt: skip
add("a rise over every epoch", "sft", "loss_rising", "loss_diverging", epochs=15,
    loss=line(1.5, 3.5, 0.02), val=flat(1.6, 0.002))  # fmt: skip
add("a noisy rise over every epoch", "sft", "loss_rising", "loss_not_falling", epochs=15,
    loss=lambda share, rng: 1.5 + 0.4 * share + 0.12 * rng.standard_normal(), val=flat(1.6, 0.002))  # fmt: skip
add("nothing is learned", "sft", "loss_not_falling", loss=flat(1.9), val=flat(1.9, 0.002))
add("wild jumps", "sft", "loss_jitter", "loss_not_falling", loss=lambda share, rng: 2.4 * abs(rng.standard_normal()),
    val=flat(1.9, 0.002))  # fmt: skip
add("a first loss of another tokenizer", "sft", "initial_loss", loss=falling(9.5, 1.1))
add("random weights begin far above guessing", "sft", "initial_loss", loss=falling(9.5, 1.1), untrained_loss=6.2)
add("pretrained weights begin at guessing", "sft", "initial_loss", loss=falling(6.1, 1.1))
add("memorized", "sft", "final_loss", "overfitting", "val_loss_rising", loss=falling(2.4, 0.01, 8.0, 0.05),
    val=noisy(lambda s: 1.2 + 4 * (s - 0.4) ** 2, 0.001))  # fmt: skip
add("overfitting", "sft", "overfitting", "val_loss_rising", loss=line(1.5, 0.3, 0.03),
    val=noisy(lambda s: 1.3 + 2 * (s - 0.5) ** 2, 0.001))  # fmt: skip
add("a validation loss that stays high", "sft", notices=["final_val_loss"], val=falling(4.0, 3.0, noise=0.003))
add("validation rises with the loss", "sft", "val_loss_rising", "loss_diverging",
    loss=from_(0.5, falling(2.4, 1.1), line(-1.0, 4.0)), val=from_(0.5, SFT_VAL, line(0.5, 3.0, 0.001)))  # fmt: skip

add("the loss of a policy rises as the reward falls", "budget", "loss_rising", "reward_falling", epochs=30,
    loss=line(0.1, 2.0, 0.02), reward_total_mean=line(0.6, -0.2, 0.02))  # fmt: skip

# Gradient and schedule
add("exploding gradients", "sft", "grad_norm_exploding", grad_norm=from_(0.7, flat(1.0, 0.2), flat(600.0, 0.5)))
add("half of the gradients are infinite", "sft", "grad_norm_exploding",
    grad_norm=lambda share, rng: math.inf if rng.random() < 0.9 else 1.0)  # fmt: skip
add("a validation without a number", "sft", "val_loss_not_finite", val=from_(0.8, SFT_VAL, NAN))
add("vanishing gradients", "sft", "grad_norm_vanishing", grad_norm=falling(1.0, 1e-6, 20.0))
add("vanishing gradients of the prompts that are not solved", "grpo", "grad_norm_vanishing",
    loss=unless_solved(BASES["grpo"]["train/loss"]), grad_norm=unless_solved(falling(1.0, 1e-6, 20.0)),
    adv_std=unless_solved(flat(0.3)))  # fmt: skip
add("another schedule", "sft", "lr_schedule", lr=line(PEAK, 0.0, 0.0))
add("a rate ten times too high", "sft", "lr_schedule", lr=flat(10 * PEAK, 0.0))

# Time and disk
add("a neighbor takes the machine", "sft", "step_time_high", step_s=from_(0.9, flat(2.0), flat(9.0)))
add("a neighbor takes the machine from the rollouts", "grpo", "step_time_high",
    step_s=from_(0.9, flat(20.0), flat(90.0)), valid_tokens_per_s=from_(0.9, flat(3000.0), flat(650.0)))  # fmt: skip
add("slower and slower", "sft", "step_time_rising", step_s=line(2.0, 4.5))
add("the disk is the bottleneck", "sft", "waiting_for_data", data_s=flat(1.2, 0.1))
add("unstable throughput", "sft", "throughput_unstable", tokens_per_s=JUMPING)
add("the disk fills", "sft", "disk_filling", disk=line(500, 10, 0.0))

# Rewards
add("the policy has no loss", "grpo", "loss_zero", loss=flat(0.0))
add("no groups", "grpo", "advantages_flat", loss=flat(0.0), adv_std=flat(0.0), grad_norm=flat(0.0),
    reward_total_mean=flat(0.5, 0.1), reward_correct_mean=flat(0.4, 0.1), reward_format_mean=flat(0.2))  # fmt: skip
add("groups are mixed up", "grpo", "advantages_not_centered", adv_mean=flat(0.4))
add("collapse of the reward", "grpo", "reward_falling", reward_total_mean=from_(0.7, line(0.3, 0.9), flat(0.1)))
add("rewards fall for many epochs", "budget", "reward_falling", epochs=30, reward_total_mean=line(0.6, -0.2, 0.02))
add("noisy rewards fall for many epochs", "budget", "reward_falling", epochs=30,
    reward_total_mean=lambda share, rng: 2.0 - 1.6 * share + 0.15 * rng.standard_normal())  # fmt: skip
add("a reward fails on half of the samples", "grpo", "reward_failures",
    reward_failures=lambda share, rng: rng.binomial(SAMPLES, 0.5))  # fmt: skip
add("always below zero", "budget", "reward_negative", epochs=30, reward_total_mean=flat(-0.7, 0.1))
add("nothing is right", "budget", "accuracy_zero", epochs=30, accuracy_mean=flat(0.0))
add("nothing is right in one epoch", "grpo", "accuracy_zero", epochs=1, reward_correct_mean=flat(0.0),
    reward_format_mean=flat(0.3))  # fmt: skip
add("format without answers", "grpo", "format_without_correctness", reward_format_mean=line(0.1, 0.5),
    reward_correct_mean=flat(0.05, 0.3))  # fmt: skip
add("entropy collapses", "grpo", "entropy_collapse", entropy=falling(0.8, 0.001, 20.0),
    reward_total_mean=flat(0.4, 0.1), reward_correct_mean=flat(0.3, 0.1), reward_format_mean=flat(0.2))  # fmt: skip
add("answers shrink", "grpo", "completions_shortening", seq_completion_len_mean=falling(240, 8, 20.0),
    reward_total_mean=flat(0.4, 0.1))  # fmt: skip
add("engine and trainer differ", "grpo", "logprob_gap", rollout_logprob_diff_mean=flat(0.12))
add("an extreme policy loss", "budget", "loss_jitter", epochs=30, loss=lambda share, rng: 300 * rng.standard_normal())
add("no reward rises", "budget", epochs=30, notices=["reward_not_rising"], reward_total_mean=flat(0.3, 0.05))
add("no answer gets better", "budget", epochs=30, notices=["accuracy_not_rising"], accuracy_mean=flat(0.3, 0.1))
add("a controller learns nothing", "budget", "nothing_improves", epochs=30,
    notices=["reward_not_rising", "accuracy_not_rising"],
    reward_total_mean=flat(0.4, 0.1), accuracy_mean=flat(0.3, 0.1), budget_violation_mean=flat(0.04, 0.2))  # fmt: skip
add("nothing changes at all", "budget", "nothing_improves", epochs=30,
    notices=["reward_not_rising", "accuracy_not_rising", "violation_high"],
    reward_total_mean=flat(0.3, 0.0), accuracy_mean=flat(0.3, 0.0), budget_violation_mean=flat(0.1, 0.0))  # fmt: skip
add("rewards jump", "grpo", "reward_jitter", reward_total_mean=lambda share, rng: 2.5 * rng.standard_normal())
add("rewards explode", "grpo", "reward_jitter", "reward_extreme",
    reward_total_mean=lambda share, rng: 1000 * rng.standard_normal())  # fmt: skip
add("rewards of a step spread widely", "grpo", "reward_spread", reward_total_std=flat(30.0, 0.1))
add("advantages are extreme", "grpo", "advantages_extreme", adv_std=flat(1000.0))
add("evaluations get worse", "grpo", "eval_reward_falling",
    evaluated=lambda share, rng: 0.6 - 2 * (share - 0.4) ** 2 + 0.01 * rng.standard_normal())  # fmt: skip

# Budgets
add("always late", "budget", "violation_high", "latency_off_budget", epochs=30, latency_ms_mean=flat(380, 0.02),
    budget_violation_mean=flat(0.8))  # fmt: skip
add("late on average", "budget", "latency_off_budget", epochs=30, latency_ms_mean=flat(300, 0.02),
    budget_violation_mean=flat(0.3))  # fmt: skip
add("accuracy is given away", "budget", "accuracy_falling", epochs=30, accuracy_mean=line(0.5, 0.2, 0.02))
add("more and more are over budget", "budget", "violation_rising", epochs=30, notices=["violation_high"],
    budget_violation_mean=line(0.02, 0.45, 0.05))  # fmt: skip
add("a controller behind its milestones", "budget", epochs=30, notices=["milestones"],
    accuracy_mean=line(0.05, 0.12, 0.05))  # fmt: skip


def history_of(rows: Rows) -> MetricHistory:
    """The history of some rows."""
    history = MetricHistory()
    for step, metrics in rows:
        history.add(step, metrics)
    return history


def view_of(curve: Curve, seed: int) -> HealthView:
    """The view of the rules at the end of a curve."""
    history = history_of(curve.rows(seed))
    schedule = LRSchedule(PEAK, "constant", 0, history.step)
    context = RunContext(curve.stage, history.step, schedule, 512, 1024, SAMPLES, untrained_loss=curve.untrained_loss)
    if curve.stage == "budget":
        context = RunContext(curve.stage, history.step)
    return HealthView(history, context, HealthLimits(**curve.limits))


def write_run(run_dir: Path, curve_name: str, status: str = "finished", reason: str = "all steps completed") -> Path:
    """Write a run of 300 steps with the metrics of a curve, and with its one checkpoint, of the last step.

    Args:
        run_dir: directory to create.
        curve_name: one of `CURVES`.
        status: status of the run.
        reason: why its last attempt ended.

    Returns:
        The run directory.
    """
    [curve] = [each for each in CURVES if each.name == curve_name]
    rows = curve.rows(0)
    total, now = rows[-1][0], time.time()
    config = load_config("sft", ["trainer.logger=[console]", "trainer.save_freq=300", "optim.lr_scheduler=constant"])
    config.optim.lr, config.optim.lr_warmup_steps_ratio = 1e-5, 0.0
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    lines = [json.dumps({"step": step, "attempt": 1, "time": now, **metrics}) for step, metrics in rows]
    (run_dir / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    attempt = {"attempt": 1, "start": "", "end": None if status == "running" else "", "first_step": 0}
    run = {"status": status, "total_steps": total, "project": "p", "experiment": "e"}
    (run_dir / "run.json").write_text(json.dumps({**run, "attempts": [{**attempt, "exit_reason": reason}]}))
    write_checkpoint(run_dir, total)
    (run_dir / "latest_checkpointed_iteration.txt").write_text(str(total))
    return run_dir


def write_checkpoint(run_dir: Path, step: int) -> None:
    """Add a checkpoint of two small files, with a manifest that has no digest."""
    directory = run_dir / f"global_step_{step}"
    (directory / "huggingface").mkdir(parents=True)
    names = ("data.pt", "huggingface/model.safetensors")
    for name in names:
        (directory / name).write_bytes(b"x" * 64)
    manifest = Manifest(step, 1, "", {name: {"bytes": 64} for name in names})
    (directory / "manifest.json").write_text(manifest.to_json())


def change_config(run_dir: Path, key: str, value: Any) -> None:
    """Change a setting in the `config.yaml` of a run."""
    config = OmegaConf.load(run_dir / "config.yaml")
    OmegaConf.update(config, key, value)
    OmegaConf.save(config, run_dir / "config.yaml")


def change_attempt(run_dir: Path, **values: object) -> None:
    """Change values of the last attempt in the `run.json` of a run."""
    run = json.loads((run_dir / "run.json").read_text())
    run["attempts"][-1].update(values)
    (run_dir / "run.json").write_text(json.dumps(run))


def make_silent(run_dir: Path, seconds: float) -> None:
    """Move all rows of a run into the past."""
    path = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**row, "time": row["time"] - seconds}) + "\n" for row in rows))
