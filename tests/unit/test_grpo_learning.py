"""Collecting experience and updating from it, with a policy that has no tokens: nothing here may need any."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.bandit import DECISIONS, Bandit, Machine, prompts
from verl_ext.errors import STOP_SIGNALS, Stop
from verl_ext.grpo.advantages import Advantages
from verl_ext.grpo.config import TokenActorConfig
from verl_ext.grpo.environment import Reward
from verl_ext.grpo.experience import Collector, Experience, Replacement
from verl_ext.grpo.failure import RewardFailure
from verl_ext.grpo.metrics import GRPOMetrics, spreads
from verl_ext.grpo.policy import Prompt
from verl_ext.grpo.update import Updated, Updater, UpdateSettings
from verl_ext.metrics.timing import StepTimer
from verl_ext.processes import StopSignals
from verl_ext.trainer.grpo import GRPOTrainer
from verl_ext.trainer.preemption import StopVote

ACTOR = TokenActorConfig()
ONCE = UpdateSettings(ACTOR, 1, 1, 64, DECISIONS)
PENALTIES: Any = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
GROUP = 8


class BrokenMachine(Machine):
    """Gives no reward to some samples."""

    def __init__(self, *broken: tuple[int, int]) -> None:
        """Row of the prompt and number of each such sample."""
        super().__init__()
        self._broken = broken

    def collect(self) -> list[Reward]:
        """See `Environment.collect`."""
        places = [(sample.prompt.row, sample.number) for sample in self._waiting]
        failed = Reward({}, {"pay": RewardFailure("broken")})
        return [failed if place in self._broken else reward for place, reward in zip(places, super().collect())]


def collected(
    bandit: Bandit,
    rows: Sequence[int],
    step: int = 1,
    replacement: Replacement | None = None,
    machine: Machine | None = None,
) -> Experience:
    """The experience of one step."""
    collector = Collector(bandit, machine or Machine(), GROUP, True, StepTimer(), "cpu")
    return collector.collect(prompts(*rows), step, replacement)


def updated(bandit: Bandit, experience: Experience, settings: UpdateSettings, lr: float = 0.0) -> Updated:
    """One step's updates; at a learning rate of 0 the gradients add up."""

    def optimizer_step(loss: float) -> float:
        assert bandit.scores.grad is not None
        norm = float(bandit.scores.grad.norm())
        if lr:
            with torch.no_grad():
                bandit.scores -= lr * bandit.scores.grad
            bandit.scores.grad = None
        return norm

    return Updater(bandit, settings, 1, optimizer_step, StepTimer(), "cpu").update(experience)


def test_experience_is_in_order() -> None:
    """However the samples came, each with its own reward."""
    experience = collected(Bandit(6), [4, 1, 5])
    places = [(sample.prompt.row, sample.number) for sample in experience.samples]
    assert places == [(row, number) for row in (4, 1, 5) for number in range(GROUP)]
    for sample, reward in zip(experience.samples, experience.rewards):
        assert reward.total == float((sample.action[0] == sample.prompt.row % 4).sum())
    rewards = torch.tensor([reward.total for reward in experience.rewards]).view(3, GROUP)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(experience.advantages.values.view(3, GROUP), expected, atol=1e-6, rtol=1e-5)


def test_groups_without_signal_are_replaced() -> None:
    """By others that have one, up to a limit; what is left then stays."""
    bandit = Bandit(40)
    with torch.no_grad():
        bandit.scores[:20] = torch.eye(4).repeat(5, 1) * 50  # always right: nothing to learn
    asked: list[tuple[int, int]] = []

    def more(number: int, count: int) -> list[Prompt]:
        asked.append((number, count))
        rows = [10 + count_so_far for count_so_far in range(count)] if number == 1 else list(range(20, 20 + count))
        return prompts(*rows)

    plain = collected(bandit, [0, 25, 1, 30])
    assert plain.advantages.num_without_signal == 2
    experience = collected(bandit, [0, 25, 1, 30], replacement=Replacement(3, more))
    assert asked == [(1, 2), (2, 2)] and experience.num_replaced == 2
    assert [sample.prompt.row for sample in experience.samples[::GROUP]] == [20, 25, 21, 30]
    assert experience.advantages.num_without_signal == 0
    asked.clear()
    short = collected(bandit, [0, 25, 1, 30], replacement=Replacement(1, more))
    assert asked == [(1, 2)] and short.num_replaced == 0 and short.advantages.num_without_signal == 2


class ImpreciseMachine(Machine):
    """Pays all samples of a prompt the same but for float64's last digits."""

    def __init__(self, *rows: int) -> None:
        """Rows of the prompts."""
        super().__init__()
        self._rows = rows

    def collect(self) -> list[Reward]:
        """See `Environment.collect`."""
        samples = list(self._waiting)
        nearly = [Reward({"pay": 0.3 if sample.number % 2 else 0.1 + 0.2}) for sample in samples]
        assert len({reward.total for reward in nearly}) == 2
        found = zip(samples, super().collect(), nearly)
        return [near if sample.prompt.row in self._rows else reward for sample, reward, near in found]


def test_rewards_that_only_float64_tells_apart_have_no_signal() -> None:
    """Their advantages, which are float32, are 0: dynamic sampling replaces such a group."""
    machine = ImpreciseMachine(0, 1)
    plain = collected(Bandit(40), [0, 25], machine=machine)
    assert plain.advantages.num_without_signal == 1 and plain.advantages.values[:GROUP].eq(0).all()
    asked = []

    def more(number: int, count: int) -> list[Prompt]:
        asked.append(count)
        return prompts(1 if number == 1 else 30)  # the first of them is no better

    experience = collected(Bandit(40), [0, 25], replacement=Replacement(2, more), machine=machine)
    assert asked == [1, 1] and [sample.prompt.row for sample in experience.samples[::GROUP]] == [30, 25]


BROKEN = [(0, 1), (0, 6), (4, 3), *((1, number) for number in range(1, GROUP))]
"""Two samples of a prompt, one of another, and all but one of a third."""


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_sample_without_a_reward_is_not_in_the_loss(mode: str) -> None:
    """The gradient is that of the other samples alone, with all terms of the loss."""
    actor = replace(ACTOR, loss_agg_mode=mode, **PENALTIES)
    settings = replace(ONCE, actor=actor, micro_batch_size=5)
    found, expected = Bandit(6), Bandit(6)
    for bandit in (found, expected):
        bandit.first += torch.linspace(-1, 1, 4)
    experience = collected(found, [0, 1, 4], machine=BrokenMachine(*BROKEN))
    samples, advantages = experience.samples, experience.advantages
    kept = [number for number, reward in enumerate(experience.rewards) if reward.total is not None]
    assert len(kept) == 3 * GROUP - len(BROKEN) and advantages.num_without_signal == 1
    others = Experience(
        [samples[number] for number in kept],
        [experience.rewards[number] for number in kept],
        Advantages(advantages.values[kept], advantages.rewarded[kept], 1),
    )
    losses = [updated(found, experience, settings).loss, updated(expected, others, settings).loss]
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != 0
    assert found.scores.grad is not None and expected.scores.grad is not None
    torch.testing.assert_close(found.scores.grad, expected.scores.grad)


def test_a_group_with_one_reward_is_replaced() -> None:
    """As one without a signal is."""
    bandit = Bandit(40)
    replacement = Replacement(1, lambda number, count: prompts(*range(4, 4 + count)))
    experience = collected(bandit, [0, 1, 5], replacement=replacement, machine=BrokenMachine(*BROKEN))
    assert [sample.prompt.row for sample in experience.samples[::GROUP]] == [0, 4, 5]


def test_figures_of_a_step_with_missing_rewards() -> None:
    """They are those of the samples with a reward; a step without any has none."""
    bandit = Bandit(6)
    machine = BrokenMachine(*BROKEN)
    report = GRPOMetrics(bandit, machine, "cpu")
    experience = collected(bandit, [0, 1, 4], machine=machine)
    figures = report.of_samples("train", experience.samples, experience.rewards)
    totals = [reward.total for reward in experience.rewards if reward.total is not None]
    assert figures["train/reward_total_mean"] == figures["train/pay_mean"] == pytest.approx(sum(totals) / len(totals))
    assert figures["train/reward_failures"] == figures["train/samples_without_reward"] == len(BROKEN)
    shown = {(row["sample_id"], row["number"]): row for row in report.rows(experience, 3 * GROUP)}
    broken = shown["prompt_0", 1]
    assert (broken["pay"], broken["reward_total"], broken["advantage"]) == (None, None, 0.0)
    machine = BrokenMachine(*((0, number) for number in range(GROUP)))
    experience = collected(bandit, [0], machine=machine)
    figures = report.of_samples("train", experience.samples, experience.rewards)
    assert "train/reward_total_mean" not in figures and figures["train/samples_without_reward"] == GROUP


def test_first_update_is_the_policy_gradient() -> None:
    """-(1/N) sum of advantage times gradient of log-probability, in float64."""
    bandit, other = Bandit(6), Bandit(6)
    experience = collected(bandit, [0, 1, 2])
    found = updated(bandit, experience, ONCE)
    batch = other.collate(experience.samples)
    values = other.log_probs(batch).values * experience.advantages.values.double()[:, None]
    (expected,) = torch.autograd.grad(-values.sum() / values.numel(), other.scores)
    assert bandit.scores.grad is not None
    torch.testing.assert_close(bandit.scores.grad, expected, rtol=1e-6, atol=1e-9)
    assert found.grad_norm == pytest.approx(float(expected.norm()))
    assert found.maxima["ratio_deviation"] < 1e-12 and found.maxima["rollout_logprob_diff"] < 1e-12


@pytest.mark.parametrize("size", [1, 5, 24])
def test_micro_batches_change_nothing(size: int) -> None:
    """With all terms of the loss."""
    actor = replace(ACTOR, **PENALTIES)
    gradients, losses = [], []
    for micro_batch_size in (24, size):
        bandit = Bandit(6)
        bandit.first += torch.linspace(-1, 1, 4)
        settings = replace(ONCE, actor=actor, micro_batch_size=micro_batch_size)
        losses.append(updated(bandit, collected(bandit, [0, 1, 2]), settings).loss)
        gradients.append(bandit.scores.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != 0


def test_old_probabilities_are_those_before_the_first_update() -> None:
    """The ratio is 1 at the first of several updates, and moves then."""
    bandit = Bandit(6)
    settings = replace(ONCE, num_mini_batches=3, num_epochs=4)
    found = updated(bandit, collected(bandit, [0, 1, 2]), settings, lr=3.0)
    assert found.maxima["ratio_deviation"] < 1e-12
    assert found.means["clip_fraction"] > 0 and abs(found.means["update_kl"]) > 1e-3


def test_importance_weights_correct_another_sampler() -> None:
    """Weights are the truncated ratio of the trainer's to the sampler's probabilities."""
    plain, corrected = Bandit(6), Bandit(6)
    experience = collected(plain, [0, 1, 2])
    shifted = [replace(s, action=(s.action[0], s.action[1] - 0.5)) for s in experience.samples]
    experience = replace(experience, samples=shifted)
    found = updated(plain, experience, ONCE)
    assert found.means["rollout_logprob_diff"] == pytest.approx(0.5)
    for threshold, weight in ((2.0, np.exp(0.5)), (1.2, 1.2)):
        corrected.scores.grad = None
        updated(corrected, experience, replace(ONCE, correction=("token", threshold)))
        assert plain.scores.grad is not None and corrected.scores.grad is not None
        torch.testing.assert_close(corrected.scores.grad, plain.scores.grad * weight)


@pytest.mark.parametrize(("num_epochs", "expected"), [(1, np.expm1(0.5)), (2, 0.0)])
def test_the_ratio_of_a_single_update_is_to_the_samplers_probabilities(num_epochs: int, expected: float) -> None:
    """Any other would be 1 by construction. With several updates, it is the ratio of the loss."""
    bandit = Bandit(6)
    experience = collected(bandit, [0, 1, 2])
    shifted = [replace(s, action=(s.action[0], s.action[1] - 0.5)) for s in experience.samples]
    found = updated(bandit, replace(experience, samples=shifted), replace(ONCE, num_epochs=num_epochs))
    assert found.maxima["ratio_deviation"] == pytest.approx(expected, abs=1e-9)


def test_a_stop_in_a_validation_ends_drawing_before_the_run_saves(one_rank: None) -> None:
    """A policy that draws with vLLM gives back the GPU's memory there."""
    bandit, signals = Bandit(6), StopSignals(STOP_SIGNALS)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.policy, trainer.global_step, trainer.stop_vote = bandit, 3, StopVote(signals, None)
    trainer.collector = Collector(bandit, Machine(), GROUP, True, StepTimer(), "cpu")

    def batches() -> Iterator[list[Prompt]]:
        yield prompts(0, 1)
        assert bandit.draws
        signals.received.append(signal.SIGTERM)
        yield prompts(2, 3)

    trainer.eval_prompts = batches  # type: ignore[method-assign]
    with pytest.raises(Stop, match="SIGTERM"):
        trainer.validate()
    assert bandit.versions == [3] and not bandit.draws


def test_an_error_while_drawing_is_told_though_the_engine_cannot_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    bandit = Bandit(1)

    def fail() -> None:
        raise RuntimeError("the engine is dead")

    monkeypatch.setattr(bandit, "end_drawing", fail)
    with pytest.raises(ValueError, match="the cause") as caught:
        with bandit.drawing(0):
            raise ValueError("the cause")
    assert caught.value.__context__ is None


@pytest.mark.parametrize("settings", [ONCE, replace(ONCE, num_mini_batches=4, num_epochs=2)])
def test_it_learns(settings: UpdateSettings) -> None:
    """The arm that pays, for every prompt."""
    bandit = Bandit(8)
    for step in range(60):
        updated(bandit, collected(bandit, range(8), step), settings, lr=20.0)
    chances = bandit.scores.detach().softmax(-1)
    assert float(chances[range(8), [row % 4 for row in range(8)]].min()) > 0.9


def test_spreads() -> None:
    """Those of all values, population standard deviation."""
    values = np.random.default_rng(0).normal(5, 2, 100)
    spread = spreads({"a": values.tolist(), "b": [3.0]}, "cpu")
    assert spread["a"].mean == pytest.approx(values.mean()) and spread["a"].std == pytest.approx(values.std())
    assert (spread["a"].min, spread["a"].max) == (values.min(), values.max())
    assert spread["b"].named("x", "mean", "std", "min", "max") == {"x_mean": 3, "x_std": 0, "x_min": 3, "x_max": 3}
