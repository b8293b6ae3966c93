"""The controller as a policy of the GRPO loop, with a tiny model as its environment."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import vlms
from tests.helpers.data import question
from tests.helpers.grpo import rewards_of
from verl_ext.controller.adapters import Inputs, VLMAdapter, adapter_for
from verl_ext.controller.config import BudgetRewardConfig
from verl_ext.controller.execution import EncodedImage, Latency, RunResult, VLMRunner
from verl_ext.controller.grpo import ControllerEnvironment, ControllerPolicy
from verl_ext.controller.inference import Decision
from verl_ext.controller.latency import FEATURES, LatencyModel, LatencySource, ModeledLatency
from verl_ext.controller.network import BudgetController, BudgetControllerConfig
from verl_ext.controller.scoring import AnswerScorer
from verl_ext.controller.space import ConfigurationSpace, cheapest_configuration
from verl_ext.data.image_questions import ImageQuestion
from verl_ext.errors import UserError
from verl_ext.grpo.protocols import Prompt, Trajectory

BUDGETS = (5.0, 50.0)


@pytest.fixture(scope="module")
def runner() -> VLMRunner:
    return VLMRunner(adapter_for(*vlms.qwen3_vl_moe(), (1024, 4096, 9216)), max_new_tokens=3)


@pytest.fixture(scope="module")
def space(runner: VLMRunner) -> ConfigurationSpace:
    return runner.adapter.space(2, 4, (1, 2, 4))


@pytest.fixture
def policy(runner: VLMRunner, space: ConfigurationSpace) -> ControllerPolicy:
    torch.manual_seed(0)
    knobs = (space.tiers, space.num_blocks, space.min_active, space.max_active, space.topk_choices)
    controller = BudgetController(BudgetControllerConfig(*knobs, 32, 32, *BUDGETS))
    for parameter in controller.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return ControllerPolicy(controller, runner, BUDGETS, seed=7, device="cpu", tier_entropy_weight=1.0)


def prompts(*numbers: int) -> list[Prompt]:
    return [Prompt(f"q{number}", number, {"sample": question(number)}) for number in numbers]


def generated(
    policy: ControllerPolicy, numbers: list[int], step: int, size: int, greedy: bool = False
) -> list[Trajectory]:
    trajectories = [Trajectory(prompt, number) for prompt in prompts(*numbers) for number in range(size)]
    return list(policy.generate(trajectories, step, greedy))


def test_sample_is_independent_of_rest_of_batch(policy: ControllerPolicy) -> None:
    both = generated(policy, [0, 1], 3, 5)
    alone = generated(policy, [1], 3, 5)
    assert [each.action.configuration for each in both[5:]] == [each.action.configuration for each in alone]
    assert (
        len({each.action.budget_ms for each in both[:5]}) == 1 and both[0].action.budget_ms != both[5].action.budget_ms
    )
    later = generated(policy, [1], 4, 5)
    assert later[0].action.budget_ms != alone[0].action.budget_ms
    assert all(BUDGETS[0] <= each.action.budget_ms <= BUDGETS[1] for each in both + later)
    assert len({each.action.configuration for each in both}) > 1


def test_greedy_generation_takes_mode_at_constant_budgets(policy: ControllerPolicy) -> None:
    one, other = (generated(policy, [0, 1], step, 1, greedy=True) for step in (1, 9))
    assert [each.action.configuration for each in one] == [each.action.configuration for each in other]
    assert [each.action.budget_ms for each in one] == [each.action.budget_ms for each in other]


def test_recomputed_log_probs_equal_rollout_log_probs(policy: ControllerPolicy) -> None:
    policy._controller.eval()
    samples = generated(policy, [0, 1, 2], 1, 4)
    found = policy.log_probs(policy.collate(samples))
    assert found.values.shape == found.entropy.shape == (12, 1)
    drawn = policy.collate(samples)["rollout_log_probs"]
    assert float((found.values - drawn).detach().abs().max().exp()) == pytest.approx(1, abs=1e-5)
    assert bool((found.entropy > 0).all())
    assert policy.table_row(samples[0]).keys() == {"prompt", "budget_ms", "tier", "blocks", "topk"}
    assert policy.table_row(samples[0])["budget_ms"] == samples[0].action.budget_ms
    assert policy.sample_metrics(samples[0])["num_active"] == samples[0].action.configuration.num_active


def test_rank_without_prompts_generates_nothing(policy: ControllerPolicy) -> None:
    policy._controller.train()
    before = torch.get_rng_state()
    assert list(policy.generate([], 1)) == []
    assert torch.equal(torch.get_rng_state(), before), "dropout used random numbers, which a resumed run would not"
    assert policy._controller.training


def test_configuration_runs_once_per_sample(runner: VLMRunner, space: ConfigurationSpace) -> None:
    sample = question(40)
    asked, found = runner.results.num_lookups, runner.results.num_hits
    outcomes = [runner.run(sample, space.configuration(1, [True, True, runs, True], 2)) for runs in (True, False, True)]
    assert outcomes[0] is outcomes[2] and outcomes[0].workload.configuration != outcomes[1].workload.configuration
    assert (runner.results.num_lookups - asked, runner.results.num_hits - found) == (3, 1)
    assert outcomes[0].latency.vision_ms == outcomes[1].latency.vision_ms > 0  # encoded once
    assert outcomes[0].workload.num_patches == 64 and outcomes[0].workload.num_prompt_tokens > 16


@pytest.mark.parametrize("warms_up", [True, False])
def test_new_input_size_is_run_once_before_measurements(
    warms_up: bool, runner: VLMRunner, space: ConfigurationSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, generate = [], type(runner.adapter).generate

    def noted(self: VLMAdapter, inputs: Inputs, *more: Any) -> list[int]:
        sizes.append(len(inputs["pixel_values"]))
        return generate(self, inputs, *more)

    monkeypatch.setattr(type(runner.adapter), "generate", noted)
    warm = VLMRunner(runner.adapter, max_new_tokens=3, warms_up=warms_up)
    cheapest = cheapest_configuration(space, None)
    for number in (50, 51):  # images of the same size
        for tier in (0, 1):
            warm.run(question(number), replace(cheapest, tier=tier))
    assert [sizes.count(each) for each in (16, 64)] == [2 + warms_up] * 2


class FixedLatency(LatencySource):
    """Returns given milliseconds."""

    is_measured, deciding_ms = False, 2.0

    def __init__(self, milliseconds: list[float]) -> None:
        self._told = iter(milliseconds)

    def run_ms(self, outcome: RunResult) -> float:
        return next(self._told)

    def encode_ms(self, low: EncodedImage) -> float:
        return 5.0

    def deciding_ms_of(self, decision: Decision) -> float:
        raise AssertionError("training does not time decisions")


def test_rewards_follow_the_run_configurations(
    policy: ControllerPolicy, runner: VLMRunner, space: ConfigurationSpace
) -> None:
    environment = ControllerEnvironment(
        runner, space, BudgetRewardConfig(), AnswerScorer([]), FixedLatency([10.0, 30.0, 90.0, 90.0])
    )
    for parameter in policy._controller.tier_head.parameters():
        torch.nn.init.zeros_(parameter)  # so that several tiers are chosen
    samples = generated(policy, [3], 1, 4)
    rewards = rewards_of(environment, samples)
    looked = [5.0 * (sample.action.configuration.tier > 0) for sample in samples]
    assert {*looked} == {0.0, 5.0}  # at the lowest tier, the answer uses the encoding of the decision
    taken = [run + look + 2.0 for run, look in zip([10.0, 30.0, 90.0, 90.0], looked, strict=True)]
    assert [reward.metrics["latency_ms"] for reward in rewards] == taken
    budget = samples[0].action.budget_ms
    question = samples[0].prompt.fields["sample"]
    for sample, reward in zip(samples, rewards, strict=True):
        answer = runner.run(question, sample.action.configuration).answer
        assert reward.texts == {"answer": answer, "references": json.dumps(question.references), "metric": "vqa"}
        assert tuple(reward.components) == environment.reward_names and reward.metrics.keys() == set(
            environment.metric_names
        )
        assert reward.metrics["budget_violation"] == (reward.metrics["latency_ms"] > budget)
        assert (reward.components["reward_violation"] < 0) == (reward.metrics["latency_ms"] > budget)


def test_measured_latency_includes_median_decision(
    runner: VLMRunner, space: ConfigurationSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the latency model that gives the time of a decision is at another percentile in training."""
    coefficients = {part: dict.fromkeys(names, 0.0) for part, names in FEATURES.items()}
    model = LatencyModel(coefficients, 1.0, "a machine", "a model", deciding_ms=2.0, scatter={"90": 1.5})
    environment = ControllerEnvironment(
        runner, space, BudgetRewardConfig(), AnswerScorer([]), ModeledLatency(model, percentile=90)
    )
    result = replace(runner.run(question(60), space.full), latency=Latency(5.0, 10.0, 4.0, 1))
    monkeypatch.setattr(runner, "run_uncached", lambda *_: result)
    encoded = replace(runner.encoded(question(60), 0), vision_ms=3.0)
    monkeypatch.setattr(runner, "encode", lambda *_: encoded)
    with environment.measuring(True):
        assert environment._run(question(60), space.full)[1] == 19.0 + 3.0 + 2.0


def test_unreadable_image_error_names_question() -> None:
    with pytest.raises(UserError, match="image of q1 cannot be read"):
        ImageQuestion("q1", b"no image", "?", ("a",)).load_image()
    with pytest.raises(UserError, match="image of q2 cannot be read"):
        ImageQuestion("q2", Path(os.devnull), "?", ("a",)).load_image()
