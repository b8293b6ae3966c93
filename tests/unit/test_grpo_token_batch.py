"""Shared prompts: each completion has the same log-probabilities as in a row of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_ext.grpo.protocols import Prompt, Trajectory
from verl_ext.grpo.sampling import Completion
from verl_ext.grpo.token_policy import (
    SHARED_PREFIX_ARCHITECTURES,
    TokenBatcher,
    completion_log_probs,
    forward_flops,
    num_tokens,
)
from verl_ext.trainer.fused_cross_entropy import TokenLoss
from verl_ext.trainer.packed_attention import PACKED_SDPA, attend_within_samples, enable_packing

ALWAYS = TokenBatcher(0, lambda rows, length: rows)
NEVER = TokenBatcher(0)
PACKED = TokenBatcher(0, packs=True)
LENGTHS = {"a": (7, [3, 9, 1]), "b": (12, [5, 5]), "c": (2, [8])}
"""By prompt: its length, and those of its completions."""


def model_of(model_type: str, implementation: str = "sdpa", **settings: object) -> PreTrainedModel:
    """A small model with random float64 weights."""
    config = AutoConfig.for_model(
        model_type,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **{"sliding_window": None, **settings},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def samples_of(lengths: dict[str, tuple[int, list[int]]]) -> list[Trajectory]:
    """Trajectories of random tokens."""
    torch.manual_seed(1)
    found = []
    for row, (name, (length, completions)) in enumerate(lengths.items()):
        prompt = Prompt(name, row, {"prompt_ids": tuple(torch.randint(3, 64, (length,)).tolist())})
        for number, size in enumerate(completions):
            tokens = tuple(torch.randint(3, 64, (size,)).tolist())
            found.append(Trajectory(prompt, number).act(Completion(tokens, torch.zeros(size), False)))
    return found


def evaluated(
    model: PreTrainedModel, batcher: TokenBatcher, samples: list[Trajectory]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and the gradient of their weighted sum."""
    model.zero_grad()
    output = completion_log_probs(model, batcher.collate(samples), 0.7, entropy_gradient=True)
    weights = torch.arange(output.values.numel()).reshape(output.values.shape)
    (output.values * weights + 0.1 * output.entropy).sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return output.values.detach(), gradient


@pytest.mark.parametrize("model_type", SHARED_PREFIX_ARCHITECTURES)
def test_shared_prompt_keeps_log_probs_and_gradients(model_type: str) -> None:
    """Checked for every architecture that supports a shared prompt."""
    model, samples = model_of(model_type), samples_of(LENGTHS)
    shared, alone = ALWAYS.collate(samples), NEVER.collate(samples)
    assert shared["input_ids"].shape == (3, 12 + 13) and alone["input_ids"].shape == (6, 12 + 9)
    values, gradient = evaluated(model, ALWAYS, samples)
    expected, expected_gradient = evaluated(model, NEVER, samples)
    # log-probabilities are computed from float32 logits
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()
    assert not torch.equal(values, torch.zeros_like(values))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", [{}, {"sliding_window": 8}])
def test_packed_rows_keep_log_probs_and_gradients(settings: dict[str, object]) -> None:
    """Samples of a packed row attend only to themselves; sliding windows included."""
    model, samples = model_of("mistral", **settings), samples_of(LENGTHS)
    expected, expected_gradient = evaluated(model, NEVER, samples)
    logits_of = TokenLoss(model, None, torch.float32, "cpu").logits
    assert enable_packing(model, logits_of, torch.float32, 31, None) is None
    packed = PACKED.collate(samples)
    assert packed["input_ids"].shape == (1, 7 * 3 + 12 * 2 + 2 + 31) and "segments" not in packed
    assert packed["sample_lengths"].tolist() == [10, 16, 8, 17, 17, 10]
    values, gradient = evaluated(model, PACKED, samples)
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
    assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()


def test_model_that_packs_shares_prompts_and_pads() -> None:
    """The attention function of packed rows applies the masks of other rows, too."""
    model, samples = model_of("llama"), samples_of(LENGTHS)
    expected, expected_gradient = evaluated(model, NEVER, samples)
    attend_within_samples(model)
    assert model.config._attn_implementation == PACKED_SDPA
    for batcher in (ALWAYS, NEVER):
        values, gradient = evaluated(model, batcher, samples)
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
        assert (gradient - expected_gradient).norm() < 1e-5 * expected_gradient.norm()


def test_cheaper_layout_is_chosen() -> None:
    """Long prompts are shared. Long completions get separate rows, because shared rows would waste attention."""
    model = model_of("llama")
    batcher = TokenBatcher(0, forward_flops(model))
    assert len(batcher.rows(samples_of({"a": (40, [2, 2, 2, 2])}))) == 1
    assert len(batcher.rows(samples_of({"a": (2, [4000] * 4)}))) == 4
    # one long completion among short ones: padding wastes most, and a shared row attends to all of them
    completions = samples_of({"a": (20, [300] + [20] * 15)})
    assert batcher.shares_prefix(completions) and not replace(batcher, packs=True).shares_prefix(completions)
    assert batcher.shares_prefix(samples_of(LENGTHS)) and not batcher.shares_prefix(
        samples_of({"a": (5, [3]), "b": (6, [3])})
    )


def test_sort_groups_shared_prompts_or_similar_lengths() -> None:
    """Without sharing, samples of similar length share a forward pass."""
    samples = samples_of(LENGTHS)
    mixed = [samples[number] for number in (5, 3, 0, 4, 2, 1)]
    assert [sample.prompt.sample_id for sample in ALWAYS.sort(mixed)] == ["b", "b", "a", "a", "a", "c"]
    lengths = [num_tokens(sample) for sample in NEVER.sort(mixed)]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("model_type", "implementation", "settings"),
    [
        ("llama", "eager", {}),
        ("gpt_neox", "sdpa", {}),
        ("mistral", "sdpa", {"sliding_window": 8}),
        ("qwen2", "sdpa", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_unsupported_models_do_not_share_prompts(
    model_type: str, implementation: str, settings: dict[str, object]
) -> None:
    """Other attention implementations, unlisted architectures and sliding windows are not supported."""
    assert forward_flops(model_of(model_type, implementation, **settings)) is None
