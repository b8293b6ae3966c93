"""Steps of a policy without tokens: `GRPOStep` must not depend on tokens."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers.bandit import DECISIONS, Bandit, Machine, grpo_step, prompts
from verl_ext.data.sampler import GlobalBatchSampler
from verl_ext.errors import STOP_SIGNALS, Stop
from verl_ext.grpo import guards
from verl_ext.grpo.config import (
    AlgorithmConfig,
    DynamicSamplingConfig,
    RolloutCorrectionConfig,
    TokenActorConfig,
    TokenAlgorithmConfig,
)
from verl_ext.grpo.metrics import ALL_STATISTICS, UpdateMetrics, distribution_metrics, sample_metrics, sample_rows
from verl_ext.grpo.protocols import (
    LogProbs,
    Metrics,
    MicroBatch,
    Prompt,
    Reward,
    RewardFailure,
    StepResult,
    Trajectory,
)
from verl_ext.grpo.step import GRPOStep, numbers_in_step
from verl_ext.processes import StopSignals
from verl_ext.trainer.grpo import GRPOTrainer
from verl_ext.trainer.preemption import StopVote

ACTOR = TokenActorConfig()
PENALTIES: Any = {"entropy_coeff": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}
GROUP = 8


class BrokenMachine(Machine):
    """A machine that gives some samples no reward."""

    def __init__(self, *broken: tuple[int, int]) -> None:
        """Index of the prompt and number of each such sample."""
        super().__init__()
        self._broken = broken

    def reward_of(self, trajectory: Trajectory) -> Reward:
        if (trajectory.prompt.index, trajectory.number) in self._broken:
            return Reward({}, {"pay": RewardFailure("broken")})
        return super().reward_of(trajectory)


def step_of(
    bandit: Bandit,
    machine: Machine | None = None,
    *,
    actor: TokenActorConfig = ACTOR,
    algorithm: AlgorithmConfig | None = None,
    num_mini_batches: int = 1,
    micro_batch_size: int = 64,
    lr: float = 0.0,
    replacement_prompts: Callable[[int, Sequence[int]], Sequence[Prompt]] = lambda round_number, numbers: [],
    vote: StopVote | None = None,
) -> GRPOStep:
    """A step for the bandit; with a learning rate of 0, gradients accumulate."""

    def optimizer_step(loss: float) -> float:
        assert bandit.scores.grad is not None
        norm = float(bandit.scores.grad.norm())
        if lr:
            with torch.no_grad():
                bandit.scores -= lr * bandit.scores.grad
            bandit.scores.grad = None
        return norm

    stops = {"is_interrupted": vote.is_interrupted, "wait": vote.wait_unless_interrupted} if vote else {}
    return grpo_step(
        bandit,
        machine or Machine(),
        algorithm or TokenAlgorithmConfig(),
        actor,
        group_size=GROUP,
        num_mini_batches=num_mini_batches,
        micro_batch_size=micro_batch_size,
        max_decisions=DECISIONS,
        num_ranks=1,
        optimizer_step=optimizer_step,
        replacement_prompts=replacement_prompts,
        **stops,
    )


def sampled(bandit: Bandit, indices: Sequence[int], machine: Machine | None = None) -> list[Trajectory]:
    """The trajectories of a step with their advantages; leaves the gradient unchanged."""
    trajectories, _ = step_of(bandit, machine).run(prompts(*indices), 1)
    bandit.scores.grad = None
    return trajectories


def shifted(trajectories: list[Trajectory], difference: float) -> list[Trajectory]:
    """The same trajectories as if sampled with other probabilities."""
    for trajectory in trajectories:
        arms, log_probs = trajectory.action
        trajectory.turns[-1] = replace(trajectory.turns[-1], action=(arms, log_probs + difference))
    return trajectories


def dynamic(max_rounds: int) -> TokenAlgorithmConfig:
    return TokenAlgorithmConfig(dynamic_sampling=DynamicSamplingConfig(max_rounds=max_rounds))


pytestmark = pytest.mark.usefixtures("one_rank")


def test_trajectories_keep_prompt_order() -> None:
    """Each has its own reward."""
    machine = Machine()
    trajectories = sampled(Bandit(6), [4, 1, 5], machine)
    places = [(trajectory.prompt.index, trajectory.number) for trajectory in trajectories]
    assert places == [(index, number) for index in (4, 1, 5) for number in range(GROUP)] and machine.num_batches == 1
    for trajectory in trajectories:
        assert trajectory.total_reward == float((trajectory.action[0] == trajectory.prompt.index % 4).sum())
    rewards = torch.tensor([trajectory.total_reward for trajectory in trajectories]).view(3, GROUP)
    expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    advantages = torch.tensor([trajectory.advantage for trajectory in trajectories]).view(3, GROUP)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("values", [[0.5, math.nan], [math.nan, 0.5]])
def test_maximum_over_micro_batches_is_nan_if_any_value_is(values: list[float]) -> None:
    metrics = UpdateMetrics("cpu")
    metrics.add_update(0.0, 0.0)
    metrics.add_sums({"rollout_logprob_diff": 0.0}, 1.0)
    for value in values:
        metrics.add_maximum("ratio_deviation", torch.tensor([0.25, value]))
    assert math.isnan(metrics.reduced()["train/ratio_deviation_max"])


class Patient(Machine):
    """Episodes of one to three turns: rewards all pulls, and the observation is the turn's number."""

    max_turns = 3

    def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
        if len(trajectory.turns) <= trajectory.number % 3:
            return lambda: StepResult(observation=len(trajectory.turns))
        pulled = sum(float(turn.action[0].sum()) for turn in trajectory.turns)
        return lambda: StepResult(reward=Reward({"pay": pulled}))


def test_multi_turn_episodes_collect_all_turns() -> None:
    """Each episode generates only in the rounds in which it is live."""
    bandit = Bandit(6)
    trajectories = step_of(bandit, Patient()).rollout(prompts(2, 3), 1, GROUP)
    assert [len(trajectory.turns) for trajectory in trajectories] == [1 + n % 3 for n in range(GROUP)] * 2
    for trajectory in trajectories:
        assert [turn.observation for turn in trajectory.turns] == [None, 1, 2][: len(trajectory.turns)]
        assert trajectory.total_reward == sum(float(turn.action[0].sum()) for turn in trajectory.turns)
    alone = step_of(bandit, Patient()).rollout(prompts(3), 1, GROUP)
    for one, other in zip(alone, trajectories[GROUP:], strict=True):
        assert [turn.action[0].tolist() for turn in one.turns] == [turn.action[0].tolist() for turn in other.turns]


def test_long_wait_for_rewards_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said, reported = [], threading.Event()

    class Slow(Machine):
        """Its last reward arrives once the wait has been reported."""

        def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
            def wait() -> StepResult:
                assert trajectory.number or step_number > 1 or reported.wait(300)
                return StepResult(reward=self.reward_of(trajectory))

            return wait

        def waiting_for(self) -> str:
            return "pay (4 of 8 samples done)"

    def warn(message: str) -> None:
        said.append(message)
        reported.set()

    monkeypatch.setattr(guards, "warn", warn)
    monkeypatch.setattr(guards, "WARN_AFTER_S", 0.25)
    step = step_of(Bandit(6), Slow())
    for step_number in (1, 2):
        step.rollout(prompts(0), step_number, GROUP)
    assert said == ["step 1: waiting for rewards for 0 s: pay (4 of 8 samples done)"]


def test_wait_without_missing_rewards_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """The last one may arrive just then; the budget controller's environment computes rewards itself."""
    guards.WaitGuard(lambda: "")._warn("step 1")
    assert capsys.readouterr().err == ""


def test_failures_in_replaced_groups_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(guards, "warn", said.append)

    class Failing(Machine):
        def reward_of(self, trajectory: Trajectory) -> Reward:
            index = trajectory.prompt.index
            if index < 2:
                return Reward({}, {"pay": RewardFailure(f"of prompt {index}", kind=f"kind {index}")})
            return super().reward_of(trajectory)

    def more(round_number: int, numbers: Sequence[int]) -> list[Prompt]:
        return prompts(*(1 if round_number == 1 else 30 for _ in numbers))

    step = step_of(Bandit(40), Failing(), algorithm=dynamic(2), replacement_prompts=more)
    trajectories, _ = step.run(prompts(0, 25), 1)
    assert [each.prompt.index for each in trajectories[::GROUP]] == [30, 25]
    assert ["kind 0" in said[0], "kind 1" in said[1], len(said)] == [True, True, 2]


def test_endless_episode_raises() -> None:
    class Endless(Machine):
        max_turns = 2

        def step(self, trajectory: Trajectory) -> Callable[[], StepResult]:
            return lambda: StepResult(observation=0)

    with pytest.raises(AssertionError, match="gives a reward in its last round"):
        step_of(Bandit(6), Endless()).rollout(prompts(0), 1, GROUP)


def test_groups_without_signal_are_replaced_up_to_limit() -> None:
    """Groups that remain after the limit are kept."""
    bandit = Bandit(40)
    with torch.no_grad():
        bandit.scores[:20] = torch.eye(4).repeat(5, 1) * 50  # always right: nothing to learn
    asked: list[tuple[int, list[int]]] = []

    def more(round_number: int, numbers: Sequence[int]) -> list[Prompt]:
        asked.append((round_number, list(numbers)))
        return prompts(*((10 if round_number == 1 else 20) + number for number in numbers))

    def run(max_rounds: int) -> tuple[list[int], Metrics]:
        step = step_of(bandit, algorithm=dynamic(max_rounds), replacement_prompts=more)
        trajectories, metrics = step.run(prompts(0, 25, 1, 30), 1)
        return [trajectory.prompt.index for trajectory in trajectories[::GROUP]], metrics

    indices, metrics = run(0)
    assert indices == [0, 25, 1, 30] and metrics["train/groups_without_signal"] == 2
    assert metrics["train/num_groups"] == 4
    indices, metrics = run(3)
    assert asked == [(1, [0, 1]), (2, [0, 1])] and metrics["train/groups_replaced"] == 2
    assert indices == [20, 25, 21, 30] and metrics["train/groups_without_signal"] == 0
    asked.clear()
    _, metrics = run(1)
    assert asked == [(1, [0, 1])]
    assert metrics["train/groups_replaced"] == 0 and metrics["train/groups_without_signal"] == 2


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_groups_have_same_replacement_on_any_number_of_ranks(num_ranks: int) -> None:
    """Two updates of eight prompts each; every third prompt has no signal."""
    samplers = [GlobalBatchSampler(16, 16, rank, num_ranks, seed=0, num_mini_batches=2) for rank in range(num_ranks)]
    rows = [next(iter(sampler)) for sampler in samplers]
    groups = [[index for index, row in enumerate(part) if row % 3 == 0] for part in rows]
    numbers = numbers_in_step(groups, per_update=8 // num_ranks)
    found = {rows[rank][i]: n for rank in range(num_ranks) for i, n in zip(groups[rank], numbers[rank], strict=True)}
    [order] = GlobalBatchSampler(16, 16, 0, 1, seed=0)
    assert found == {row: number for number, row in enumerate(row for row in order if row % 3 == 0)}


class ImpreciseMachine(Machine):
    """Gives all samples of a prompt the same reward except for the last digits of float64."""

    def __init__(self, *indices: int) -> None:
        """Of the prompts."""
        super().__init__()
        self._indices = indices

    def reward_of(self, trajectory: Trajectory) -> Reward:
        if trajectory.prompt.index in self._indices:
            return Reward({"pay": 0.3 if trajectory.number % 2 else 0.1 + 0.2})
        return super().reward_of(trajectory)


def test_rewards_equal_up_to_rounding_have_no_signal() -> None:
    """Their advantages are 0, so dynamic sampling replaces such a group."""
    assert 0.1 + 0.2 != 0.3
    machine = ImpreciseMachine(0, 1)
    trajectories, metrics = step_of(Bandit(40), machine).run(prompts(0, 25), 1)
    assert metrics["train/groups_without_signal"] == 1
    assert not any(trajectory.advantage for trajectory in trajectories[:GROUP])
    asked = []

    def more(round_number: int, numbers: Sequence[int]) -> list[Prompt]:
        asked.append(list(numbers))
        return prompts(1 if round_number == 1 else 30)  # the first of them is no better

    step = step_of(Bandit(40), machine, algorithm=dynamic(2), replacement_prompts=more)
    trajectories, _ = step.run(prompts(0, 25), 1)
    assert asked == [[0], [0]] and [trajectory.prompt.index for trajectory in trajectories[::GROUP]] == [30, 25]


BROKEN = [(0, 1), (0, 6), (4, 3), *((1, number) for number in range(1, GROUP))]
"""Two samples of a prompt, one of another, and all but one of a third."""


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_sample_without_reward_is_excluded_from_loss(mode: Any) -> None:
    """The gradient equals that of the other samples, with all loss terms."""
    actor = replace(ACTOR, loss_agg_mode=mode, **PENALTIES)
    found, expected = Bandit(6), Bandit(6)
    for bandit in (found, expected):
        bandit.first += torch.linspace(-1, 1, 4)
    trajectories = sampled(found, [0, 1, 4], BrokenMachine(*BROKEN))
    others = [trajectory for trajectory in trajectories if trajectory.total_reward is not None]
    assert len(others) == 3 * GROUP - len(BROKEN)
    metrics = [
        step_of(bandit, actor=actor, micro_batch_size=5).update(each)
        for bandit, each in ((found, trajectories), (expected, others))
    ]
    assert metrics[0]["train/loss"] == pytest.approx(metrics[1]["train/loss"]) and metrics[0]["train/loss"] != 0
    assert found.scores.grad is not None and expected.scores.grad is not None
    torch.testing.assert_close(found.scores.grad, expected.scores.grad)


@pytest.mark.parametrize(
    ("without", "updates"), [((0, 1, 2), "ssssss"), ((0,), "suusuu"), ((2,), "uusuus"), ((), "uuuuuu")]
)
def test_update_without_any_reward_is_skipped(without: tuple[int, ...], updates: str) -> None:
    """Momentum would move the scores; each prompt is one of three mini-batches in two passes."""
    bandit, expected, found = RecordingBandit(6), Bandit(6), ""
    momentum = torch.ones_like(bandit.scores)
    machine = BrokenMachine(*((index, number) for index in without for number in range(GROUP)))
    step = step_of(bandit, machine, actor=replace(ACTOR, ppo_epochs=2), num_mini_batches=3)

    def optimizer_step(loss: float) -> float:
        nonlocal found
        found += "u"
        with torch.no_grad():
            bandit.scores -= momentum
        return 0.0

    def skip_update() -> None:
        nonlocal found
        found += "s"

    step.optimizer_step, step.skip_update = optimizer_step, skip_update
    metrics = step.update(step.rollout(prompts(0, 1, 2), 1, GROUP))
    assert found == updates and len(bandit.passes) == 3 * (3 - len(without))  # also for the old log-probabilities
    torch.testing.assert_close(bandit.scores, expected.scores - momentum * updates.count("u"))
    missing = {"train/loss", "train/grad_norm", "train/ratio_deviation_max"} - metrics.keys()
    assert len(missing) == (0 if "u" in updates else 3)


def test_group_with_one_reward_is_replaced() -> None:
    step = step_of(
        Bandit(40),
        BrokenMachine(*BROKEN),
        algorithm=dynamic(1),
        replacement_prompts=lambda number, numbers: prompts(*(4 + each for each in numbers)),
    )
    trajectories, _ = step.run(prompts(0, 1, 5), 1)
    assert [trajectory.prompt.index for trajectory in trajectories[::GROUP]] == [0, 4, 5]


def test_metrics_exclude_samples_without_reward() -> None:
    """A step without any reward has no reward metrics."""
    bandit = Bandit(6)
    machine = BrokenMachine(*BROKEN)
    trajectories = sampled(bandit, [0, 1, 4], machine)
    metrics = sample_metrics("train", trajectories, bandit, machine, "cpu")
    totals = [each.total_reward for each in trajectories if each.total_reward is not None]
    assert metrics["train/reward_total_mean"] == metrics["train/pay_mean"] == pytest.approx(sum(totals) / len(totals))
    assert metrics["train/reward_failures"] == metrics["train/samples_without_reward"] == len(BROKEN)
    shown = {(row["sample_id"], row["number"]): row for row in sample_rows("train", trajectories, bandit, machine)}
    broken = shown["prompt_0", 1]
    assert (broken["pay"], broken["reward_total"], broken["advantage"]) == (None, None, 0.0)
    machine = BrokenMachine(*((0, number) for number in range(GROUP)))
    trajectories = step_of(bandit, machine).rollout(prompts(0), 1, GROUP)
    metrics = sample_metrics("train", trajectories, bandit, machine, "cpu")
    assert "train/reward_total_mean" not in metrics and metrics["train/samples_without_reward"] == GROUP


def test_first_update_equals_policy_gradient() -> None:
    """The reference is -(1/N) sum of advantage times gradient of log-probability, in float64."""
    bandit, other = Bandit(6), Bandit(6)
    trajectories, metrics = step_of(bandit).run(prompts(0, 1, 2), 1)
    advantages = torch.tensor([trajectory.advantage for trajectory in trajectories], dtype=torch.float64)
    values = other.log_probs(other.collate(trajectories)).values * advantages[:, None]
    (expected,) = torch.autograd.grad(-values.sum() / values.numel(), other.scores)
    assert bandit.scores.grad is not None
    torch.testing.assert_close(bandit.scores.grad, expected, rtol=1e-6, atol=1e-9)
    assert metrics["train/grad_norm"] == pytest.approx(float(expected.norm()))
    assert metrics["train/ratio_deviation_max"] < 1e-12 and metrics["train/rollout_logprob_diff_max"] < 1e-12


@pytest.mark.parametrize("size", [1, 5, 24])
def test_gradient_is_independent_of_micro_batch_size(size: int) -> None:
    actor = replace(ACTOR, **PENALTIES)
    gradients, losses = [], []
    for micro_batch_size in (24, size):
        bandit = Bandit(6)
        bandit.first += torch.linspace(-1, 1, 4)
        step = step_of(bandit, actor=actor, micro_batch_size=micro_batch_size)
        losses.append(step.run(prompts(0, 1, 2), 1)[1]["train/loss"])
        gradients.append(bandit.scores.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    assert losses[0] == pytest.approx(losses[1]) and losses[0] != 0


class GenerousMachine(Machine):
    """Pays for every sample of some prompts, and for every second one of the others."""

    def __init__(self, generous: set[int]) -> None:
        """Indices of these prompts."""
        super().__init__()
        self._generous = generous

    def reward_of(self, trajectory: Trajectory) -> Reward:
        return Reward({"pay": float(trajectory.prompt.index in self._generous or trajectory.number % 2)})


class RecordingBandit(Bandit):
    """Records for each forward pass of an update whether a backward pass follows."""

    def __init__(self, num_prompts: int) -> None:
        """Random scores."""
        super().__init__(num_prompts)
        self.passes: list[bool] = []

    def log_probs(self, micro_batch: MicroBatch) -> LogProbs:
        self.passes.append(torch.is_grad_enabled())
        return super().log_probs(micro_batch)


@pytest.mark.parametrize(
    ("generous", "penalties", "passes"),
    [
        ({1}, {}, [False, True, True]),
        ({0, 1, 2}, {}, [False, False, True]),
        (set(), {}, [True] * 3),
        ({1}, {"entropy_coeff": 0.1}, [True] * 3),
        ({1}, {"use_kl_loss": True}, [True] * 3),
    ],
)
def test_groups_without_signal_have_no_backward_pass(
    generous: set[int], penalties: dict[str, Any], passes: list[bool]
) -> None:
    actor, machine = replace(ACTOR, **penalties), GenerousMachine(generous)
    one, several, metrics = RecordingBandit(6), RecordingBandit(6), []
    for bandit, size in ((one, 3 * GROUP), (several, GROUP)):
        bandit.first += torch.linspace(-1, 1, 4)
        metrics.append(step_of(bandit, machine, actor=actor, micro_batch_size=size).run(prompts(0, 1, 2), 1)[1])
    assert one.passes == [True] and several.passes == passes
    torch.testing.assert_close(one.scores.grad, several.scores.grad)
    assert metrics[1] == pytest.approx(metrics[0], abs=1e-12)


def test_old_log_probs_are_from_before_first_update() -> None:
    """The ratio is 1 at the first of several updates and changes afterwards."""
    step = step_of(Bandit(6), actor=replace(ACTOR, ppo_epochs=4), num_mini_batches=3, lr=3.0)
    _, metrics = step.run(prompts(0, 1, 2), 1)
    assert metrics["train/ratio_deviation_max"] < 1e-12
    assert metrics["train/clip_fraction"] > 0 and abs(metrics["train/update_kl"]) > 1e-3


def test_importance_weights_correct_off_policy_samples() -> None:
    """The weights are the truncated ratio of trainer to sampler probabilities."""
    plain, corrected = Bandit(6), Bandit(6)
    trajectories = shifted(sampled(plain, [0, 1, 2]), -0.5)
    metrics = step_of(plain).update(trajectories)
    assert metrics["train/rollout_logprob_diff_mean"] == pytest.approx(0.5)
    for threshold, weight in ((2.0, np.exp(0.5)), (1.2, 1.2)):
        corrected.scores.grad = None
        correction = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=threshold)
        step_of(corrected, algorithm=TokenAlgorithmConfig(rollout_correction=correction)).update(trajectories)
        assert plain.scores.grad is not None and corrected.scores.grad is not None
        torch.testing.assert_close(corrected.scores.grad, plain.scores.grad * weight)


@pytest.mark.parametrize(("num_epochs", "expected"), [(1, np.expm1(0.5)), (2, 0.0)])
def test_single_update_ratio_is_relative_to_sampler(num_epochs: int, expected: float) -> None:
    """Relative to the trainer, it would be 1 by construction. With several updates, it is the loss ratio."""
    bandit = Bandit(6)
    trajectories = shifted(sampled(bandit, [0, 1, 2]), -0.5)
    metrics = step_of(bandit, actor=replace(ACTOR, ppo_epochs=num_epochs)).update(trajectories)
    assert metrics["train/ratio_deviation_max"] == pytest.approx(expected, abs=1e-9)


def test_stop_during_validation_ends_sampling_before_save() -> None:
    """A policy that generates with vLLM releases its GPU memory when sampling ends."""
    bandit, signals = Bandit(6), StopSignals(STOP_SIGNALS)
    trainer = GRPOTrainer.__new__(GRPOTrainer)
    trainer.policy, trainer.global_step, trainer.stop_vote = bandit, 3, StopVote(signals, None)
    trainer.step, trainer.checkpoint_manager = step_of(bandit), Mock(is_writing=False)

    def batches() -> Iterator[list[Prompt]]:
        yield prompts(0, 1)
        assert bandit.samples
        signals.received.append(signal.SIGTERM)
        yield prompts(2, 3)

    trainer.eval_batches = batches  # type: ignore[method-assign, assignment]
    with pytest.raises(Stop, match="SIGTERM"):
        trainer.validate()
    assert bandit.versions == [3] and not bandit.samples


def impatient_vote() -> StopVote:
    """A vote that abandons steps."""
    vote = StopVote(StopSignals(STOP_SIGNALS), None, grace_s=10.0)
    vote.note(step_s=9.0, save_s=2.0)
    vote.raise_if_stopping()
    return vote


def test_step_is_abandoned_while_rewards_are_computed() -> None:
    """The rewards of a budget controller are computed one after the other, when they are requested."""
    vote, bandit, machine, num_rewards = impatient_vote(), Bandit(6), Machine(), 0

    def answer(trajectory: Trajectory) -> StepResult:
        nonlocal num_rewards
        num_rewards += 1
        if num_rewards == 3:
            assert vote.signals is not None
            vote.signals.received.append(signal.SIGTERM)
        return StepResult(reward=Reward({"pay": 1.0}))

    machine.step = lambda trajectory: partial(answer, trajectory)  # type: ignore[method-assign]
    with pytest.raises(Stop, match="SIGTERM"):
        step_of(bandit, machine, vote=vote).run(prompts(0, 1), 1)
    assert num_rewards == 3


def test_step_is_abandoned_while_rewards_are_missing() -> None:
    vote, bandit, machine = impatient_vote(), Bandit(6), Machine()
    step = step_of(bandit, machine, vote=vote)
    machine.step = lambda trajectory: lambda: pytest.fail("it waits for a reward")  # type: ignore[method-assign]

    def waiting_for() -> str:
        assert vote.signals is not None
        vote.signals.received.append(signal.SIGTERM)
        return "a slow reward"

    step.environment.waiting_for = waiting_for  # type: ignore[method-assign]
    with pytest.raises(Stop, match="SIGTERM"):
        step.run(prompts(0, 1), 1)
    assert bandit.versions == [0] and not bandit.samples


@pytest.mark.parametrize(("num_epochs", "num_mini_batches"), [(1, 1), (2, 4)])
def test_policy_learns_best_arm(num_epochs: int, num_mini_batches: int) -> None:
    bandit = Bandit(8)
    actor = replace(ACTOR, ppo_epochs=num_epochs)
    step = step_of(bandit, actor=actor, num_mini_batches=num_mini_batches, lr=20.0)
    for number in range(60):
        step.run(prompts(*range(8)), number)
    chances = bandit.scores.detach().softmax(-1)
    assert float(chances[range(8), [row % 4 for row in range(8)]].min()) > 0.9


def test_distribution_metrics_equal_numpy() -> None:
    """The standard deviation is that of the population."""
    values = np.random.default_rng(0).normal(5, 2, 100)
    columns, statistics = {"a": values.tolist(), "b": [3.0], "c": []}, dict.fromkeys("abc", ALL_STATISTICS)
    found = distribution_metrics(columns, statistics, "cpu")
    assert found["a_mean"] == pytest.approx(values.mean()) and found["a_std"] == pytest.approx(values.std())
    assert (found["a_min"], found["a_max"]) == (values.min(), values.max())
    assert [found[f"b_{statistic}"] for statistic in ALL_STATISTICS] == [3, 0, 3, 3]
    assert not any(name.startswith("c") for name in found)
