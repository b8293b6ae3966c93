"""An engine whose log-probabilities are not the trained model's is found in the first steps of a start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.helpers.grpo_reference import make_model
from verl_ext.errors import UserError
from verl_ext.grpo.guards import CHECKED_STEPS, FLOAT32_GAP, EngineGuard
from verl_ext.grpo.policy import Prompt
from verl_ext.grpo.rollout.completion import Completion, Draw, Sampling
from verl_ext.grpo.rollout.engine import WeightKeeper
from verl_ext.grpo.rollout.hf_engine import HfRollout
from verl_ext.grpo.rollout.vllm_engine import leave_to_trainer
from verl_ext.grpo.tokens.layout import Layout
from verl_ext.grpo.tokens.policy import TokenModel, TokenPolicy

pytestmark = pytest.mark.usefixtures("one_rank")
SAMPLING = Sampling(0.9, 1.0, -1, 8)
PROMPTS = [Prompt(f"p{length}", length, {"prompt_ids": tuple(range(3, 3 + length))}) for length in (4, 9)]


class OtherEngine(WeightKeeper):
    """Draws by a model of its own, to which nothing is ever sent."""

    dtype, forgets_in_sleep = torch.float32, False

    def __init__(self, distance: float) -> None:
        self.engine = HfRollout(make_model(distance), 0, [2], 8, nullcontext)
        self.asked: list[Sampling] = []

    def draw(self, draws: Sequence[Draw], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        self.asked.append(sampling)
        return self.engine.draw(draws, sampling)

    def load_bucket(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None: ...

    def end_load(self) -> None: ...

    def wake(self) -> None: ...

    def sleep(self) -> None: ...

    def close(self) -> None: ...


def policy_of(engine: WeightKeeper | HfRollout, sampling: Sampling = SAMPLING) -> TokenPolicy:
    model = TokenModel(make_model(), lambda evaluate: evaluate(make_model()), nullcontext, "cpu", False, Layout(0))
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "")
    return TokenPolicy(model, tokenizer, engine, None, sampling, 0)  # type: ignore[arg-type]


def check_steps(guard: EngineGuard, policy: TokenPolicy, steps: Sequence[int]) -> None:
    for step in steps:
        samples = list(policy.draw(PROMPTS, step, num_samples=3))
        guard.check(step, guard.draw(step, samples))


def test_an_engine_with_the_trained_weights_passes() -> None:
    policy = policy_of(OtherEngine(0.0))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, range(1, 5))


def test_an_engine_with_other_weights_stops_the_run() -> None:
    policy = policy_of(OtherEngine(0.05))
    with pytest.raises(UserError, match=r"step 1: the engine's log-probabilities differ .* \(more than 0.01\)"):
        check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])


def test_only_the_first_steps_are_checked() -> None:
    """`train/rollout_logprob_diff_mean` watches the others."""
    right, wrong = policy_of(OtherEngine(0.0)), policy_of(OtherEngine(0.05))
    guard = EngineGuard(right, FLOAT32_GAP, 4, "cpu")
    check_steps(guard, right, range(CHECKED_STEPS))
    guard.policy = wrong
    check_steps(guard, wrong, [CHECKED_STEPS])


def test_a_model_that_draws_itself_is_not_checked() -> None:
    policy = policy_of(HfRollout(make_model(0.05), 0, [2], 8, nullcontext))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])


def test_an_engine_that_tells_of_a_part_of_the_distribution_draws_again() -> None:
    """What `top_p` leaves has other probabilities than the model's."""
    engine = OtherEngine(0.0)
    policy = policy_of(engine, replace(SAMPLING, top_p=0.7, max_tokens=40))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])
    assert [(sampling.top_p, sampling.max_tokens) for sampling in engine.asked] == [(0.7, 40), (1.0, 16)]
    with pytest.raises(UserError, match="step 1"):
        wrong = policy_of(OtherEngine(0.05), replace(SAMPLING, top_k=3))
        check_steps(EngineGuard(wrong, FLOAT32_GAP, 4, "cpu"), wrong, [1])


def test_a_class_that_vllm_changes_serves_the_trainer_too() -> None:
    """As vLLM changes a class of transformers that it runs: calls look for an attribute of vLLM's own instances."""

    class Decoder(torch.nn.Module):
        def forward(self, value: int) -> int:
            return value

    trained, drawing = Decoder(), Decoder()
    Decoder.__call__ = lambda self, value: self.forward(value) if self.do_not_compile else -1  # type: ignore[method-assign]
    drawing.do_not_compile = False
    with pytest.raises(AttributeError):
        trained(3)
    leave_to_trainer(torch.nn.Sequential(drawing))
    assert trained(3) == 3 and drawing(3) == -1
