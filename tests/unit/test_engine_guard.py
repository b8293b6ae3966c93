"""An engine whose log-probabilities differ from the trained model's is detected in the first steps after a start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.grpo_reference import make_model
from verl_ext.errors import Stop, UserError
from verl_ext.grpo.guards import CHECKED_STEPS, FLOAT32_GAP, EngineGuard
from verl_ext.grpo.hf_engine import HFEngine
from verl_ext.grpo.protocols import Prompt, Trajectory
from verl_ext.grpo.sampling import Completion, RolloutEngine, SampleRequest, SamplingArgs
from verl_ext.grpo.token_policy import TokenBatcher, TokenPolicy
from verl_ext.grpo.vllm_engine import leave_to_trainer

pytestmark = pytest.mark.usefixtures("one_rank")
SAMPLING = SamplingArgs(0.9, 1.0, -1, 8)
PROMPTS = [Prompt(f"p{length}", length, {"prompt_ids": tuple(range(3, 3 + length))}) for length in (4, 9)]


class OtherEngine(RolloutEngine):
    """An engine that generates with its own model and never receives weights."""

    dtype = torch.float32

    def __init__(self, distance: float) -> None:
        self.engine = HFEngine(make_model(distance), 0, [2], 8, nullcontext)
        self.asked: list[SamplingArgs] = []

    def generate(self, requests: Sequence[SampleRequest], sampling: SamplingArgs) -> Iterator[tuple[int, Completion]]:
        self.asked.append(sampling)
        return self.engine.generate(requests, sampling)


def policy_of(engine: RolloutEngine, sampling: SamplingArgs = SAMPLING) -> TokenPolicy:
    tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "")
    context: Any = {"autocast": nullcontext, "device": "cpu"}
    return TokenPolicy(make_model(), tokenizer, engine, TokenBatcher(0), sampling, seed=0, **context)


def check_steps(guard: EngineGuard, policy: TokenPolicy, steps: Sequence[int]) -> None:
    for step in steps:
        trajectories = [Trajectory(prompt, number) for prompt in PROMPTS for number in range(3)]
        guard.check(step, guard.generate(step, list(policy.generate(trajectories, step))))


def test_engine_with_trained_weights_passes() -> None:
    policy = policy_of(OtherEngine(0.0))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, range(1, 5))


def test_engine_with_other_weights_stops_run() -> None:
    policy = policy_of(OtherEngine(0.05))
    with pytest.raises(UserError, match=r"step 1: the engine's log-probabilities differ .* \(limit: 0.01\)"):
        check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])


def test_only_first_steps_are_checked() -> None:
    """Later steps are covered by `train/rollout_logprob_diff_mean`."""
    right, wrong = policy_of(OtherEngine(0.0)), policy_of(OtherEngine(0.05))
    guard = EngineGuard(right, FLOAT32_GAP, 4, "cpu")
    check_steps(guard, right, range(CHECKED_STEPS))
    guard.policy = wrong
    check_steps(guard, wrong, [CHECKED_STEPS])


def test_trained_model_as_engine_is_not_checked() -> None:
    policy = policy_of(HFEngine(make_model(0.05), 0, [2], 8, nullcontext))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])


def test_truncated_sampling_is_checked_with_full_distribution() -> None:
    """With `top_p`, the sampling probabilities differ from the model's."""
    engine = OtherEngine(0.0)
    policy = policy_of(engine, replace(SAMPLING, top_p=0.7, max_tokens=40))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])
    assert [(sampling.top_p, sampling.max_tokens) for sampling in engine.asked] == [(0.7, 40), (1.0, 16)]
    with pytest.raises(UserError, match="step 1"):
        wrong = policy_of(OtherEngine(0.05), replace(SAMPLING, top_k=3))
        check_steps(EngineGuard(wrong, FLOAT32_GAP, 4, "cpu"), wrong, [1])


@pytest.mark.parametrize(("error", "releases"), [(Stop("SIGTERM"), True), (ValueError("the cause"), False)])
def test_sampling_error_is_raised_even_if_engine_is_dead(error: Exception, releases: bool) -> None:
    """A stop releases the engine's memory. After any other error, the engine may be dead."""
    engine, calls = OtherEngine(0.0), []
    engine.release_memory = lambda: calls.append("released")  # type: ignore[method-assign]
    with pytest.raises(type(error), match=str(error)) as caught, policy_of(engine).sampling(0):
        raise error
    assert bool(calls) == releases and caught.value.__context__ is None
    with policy_of(engine).sampling(0) as metrics:
        assert metrics == {}
    assert len(calls) == 1 + releases


def test_model_class_patched_by_vllm_still_works_in_trainer() -> None:
    """vLLM patches a transformers class so that calls read an attribute that only vLLM's instances have."""

    class Decoder(torch.nn.Module):
        def forward(self, value: int) -> int:
            return value

    trained, generating = Decoder(), Decoder()
    Decoder.__call__ = lambda self, value: self.forward(value) if self.do_not_compile else -1  # type: ignore[method-assign]
    generating.do_not_compile = False
    with pytest.raises(AttributeError):
        trained(3)
    leave_to_trainer(torch.nn.Sequential(generating))
    assert trained(3) == 3 and generating(3) == -1
