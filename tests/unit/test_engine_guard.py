"""Engines that cannot start, and engines whose log-probabilities differ from the trained model's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.grpo_reference import make_model
from verl_ext.distributed import is_failure_of_peer, lost_connection
from verl_ext.errors import Stop, UserError
from verl_ext.grpo.guards import CHECKED_STEPS, FLOAT32_GAP, EngineGuard
from verl_ext.grpo.hf_engine import HFEngine
from verl_ext.grpo.protocols import Prompt, Trajectory
from verl_ext.grpo.sampling import Completion, RolloutEngine, SampleRequest, SamplingArgs
from verl_ext.grpo.token_policy import TokenBatcher, TokenPolicy
from verl_ext.grpo.vllm_engine import (
    VLLMRolloutEngine,
    _completion,
    leave_to_trainer,
    remedy_of,
    require_free_memory,
)
from verl_ext.vllm_setup import require_vllm_arguments

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
    context: Any = {"autocast": nullcontext, "device": "cpu", "entropy_gradient": False, "reference": None}
    return TokenPolicy(make_model(), tokenizer, engine, TokenBatcher(0), sampling, seed=0, **context)


def check_steps(guard: EngineGuard, policy: TokenPolicy, steps: Sequence[int]) -> None:
    for step in steps:
        trajectories = [Trajectory(prompt, number) for prompt in PROMPTS for number in range(3)]
        guard.check(step, list(policy.generate(trajectories, step)))


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


def test_filtered_sampling_is_checked() -> None:
    """With `top_p`, the sampling probabilities differ from the model's, but not the engine's log-probabilities."""
    policy = policy_of(OtherEngine(0.0), replace(SAMPLING, top_p=0.7, max_tokens=40))
    check_steps(EngineGuard(policy, FLOAT32_GAP, 4, "cpu"), policy, [1])
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


@pytest.mark.parametrize(
    ("free", "says"),
    [
        ([60, 56], None),
        (
            [60, 40],
            "rank 1 has 40.0 GiB of 80.0 GiB free, .*=0.7 needs 56.0 GiB; .* or set .*utilization to 0.5 or less",
        ),
        ([60, 0.5], "=0.7 needs 56.0 GiB; end other processes on the GPU$"),
    ],
)
def test_rank_with_too_little_gpu_memory_stops_all(
    monkeypatch: pytest.MonkeyPatch, free: list[float], says: str | None
) -> None:
    """The GPUs' memory is mocked."""
    sizes = [(int(gib * 2**30), 80 << 30) for gib in free]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: sizes[0])
    monkeypatch.setattr(dist, "get_world_size", lambda: len(sizes))
    monkeypatch.setattr(dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), sizes))
    with nullcontext() if says is None else pytest.raises(UserError, match=says):
        require_free_memory(0.7)


@pytest.mark.parametrize(
    ("error", "has_gpu", "remedy"),
    [
        (ValueError("Model architectures ['X'] are not supported"), True, "set rollout.engine=hf"),
        (torch.OutOfMemoryError("Tried to allocate 2 GiB"), True, "raise rollout.gpu_memory_utilization"),
        (ValueError("No available memory for the cache blocks."), True, "raise rollout.gpu_memory_utilization"),
        (ValueError("Available memory on node 0 is less than requested"), False, "end other processes"),
    ],
)
def test_memory_error_of_vllm_does_not_advise_another_engine(
    monkeypatch: pytest.MonkeyPatch, error: Exception, has_gpu: bool, remedy: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert remedy_of(error).startswith(remedy)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_weight_sync_on_gpus_ends_with_weights_that_attention_derives(on_gpu: bool) -> None:
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class LatentAttention(AttentionLayerBase, torch.nn.Module):
        get_attn_backend = get_kv_cache_spec = None

        def process_weights_after_loading(self, dtype: torch.dtype) -> None:
            self.derived = model[0].weight.to(dtype).T

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), LatentAttention())
    engine: Any = VLLMRolloutEngine.__new__(VLLMRolloutEngine)
    engine.dtype, engine._packs, engine._is_reloading, engine._missing = torch.bfloat16, not on_gpu, False, set()
    engine._llm = SimpleNamespace(apply_model=lambda function: [function(model)])
    engine._engine = SimpleNamespace(reset_prefix_cache=lambda: None)
    engine.finish_weight_sync()
    # on CPUs, vLLM does this at the end of a reload
    assert hasattr(model[1], "derived") == on_gpu
    if on_gpu:
        torch.testing.assert_close(model[1].derived, model[0].weight.detach().bfloat16().T)


def test_non_finite_logits_of_vllm_advise_another_dtype() -> None:
    output = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=math.nan)}], finish_reason="stop")
    with pytest.raises(UserError, match="logits are not finite; set rollout.dtype=bfloat16 or float32"):
        _completion(output)


def test_unknown_engine_argument_is_rejected() -> None:
    require_vllm_arguments(["max_num_batched_tokens"], "rollout.vllm")
    with pytest.raises(UserError, match=r"no argument max_num_seq \(.*did you mean rollout.vllm.max_num_seqs\?"):
        require_vllm_arguments(["max_num_seq"], "rollout.vllm")


def test_failure_of_peer_is_not_error_of_this_rank() -> None:
    gloo = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
    assert is_failure_of_peer(gloo) and is_failure_of_peer(dist.DistBackendError("NCCL error"))
    assert not is_failure_of_peer(RuntimeError("Engine core initialization failed"))
    assert lost_connection(gloo) == "Connection closed by peer"
    assert lost_connection(RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting")) is None
