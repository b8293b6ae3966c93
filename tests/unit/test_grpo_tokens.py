"""Token completions as actions: their log-probabilities, their seeds, and the Hugging Face engine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.helpers.bandit import Machine, grpo_step
from tests.helpers.grpo_reference import GROUP_SIZE, make_model, make_trajectories
from tests.helpers.grpo_reference import SAMPLING as REFERENCE_SAMPLING
from tests.helpers.models import HEAD, PACKING_FAMILIES, PADDING_FAMILIES, SHAPE
from verl_ext.errors import UserError
from verl_ext.grpo.config import RolloutCorrectionConfig, TokenActorConfig, TokenAlgorithmConfig
from verl_ext.grpo.hf_engine import HFEngine, SeededHFLogitsProcessor
from verl_ext.grpo.protocols import Prompt, Reward, RewardFailure, Trajectory
from verl_ext.grpo.sampling import Completion, SampleRequest, SamplingArgs, sample_seed, sample_tokens
from verl_ext.grpo.token_policy import TokenBatcher, TokenPolicy, completion_log_probs
from verl_ext.trainer.model import disable_dropout
from verl_ext.trainer.packed_attention import PACKED_SDPA, attend_within_samples

SAMPLING = SamplingArgs(0.8, 1.0, -1, 12)


@pytest.fixture(scope="module")
def model(quickstart: Path) -> PreTrainedModel:
    """A small model with random weights and uneven probabilities."""
    model = AutoModelForCausalLM.from_pretrained(quickstart / "model").double().eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def pad(quickstart: Path) -> int:
    """The padding token of the model."""
    return AutoTokenizer.from_pretrained(quickstart / "model").pad_token_id


def prompt_of(length: int) -> tuple[int, ...]:
    """Random tokens that differ for each length."""
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(10, 400, (length,), generator=generator).tolist())


def requests(*lengths: int) -> list[SampleRequest]:
    """One request for each prompt length."""
    return [SampleRequest(prompt_of(length), sample_seed(1, 2, f"p{length}", 0)) for length in lengths]


def generated(engine: HFEngine, wanted: list[SampleRequest], sampling: SamplingArgs = SAMPLING) -> list[Completion]:
    """Completions in the order of the requests."""
    found = dict(engine.generate(wanted, sampling))
    return [found[number] for number in range(len(wanted))]


def engine_of(model: PreTrainedModel, pad: int, batch_size: int = 8, end: int = 3) -> HFEngine:
    """An engine for the model."""
    return HFEngine(model, pad, [end], batch_size, nullcontext)


def test_log_probs_ignore_padding(model: PreTrainedModel, pad: int) -> None:
    """They equal those of each sample alone at the temperature, and are zero after its end."""
    samples = [
        Trajectory(Prompt(f"{n}", n, {"prompt_ids": prompt_of(n)}), 0).act(
            Completion(prompt_of(m), torch.arange(m) / 9, False)
        )
        for n, m in ((5, 9), (20, 3), (11, 6))
    ]
    batch = TokenBatcher(pad).collate(samples)
    assert batch["input_ids"].shape == (3, 29) and batch["response_mask"].sum(-1).tolist() == [9, 3, 6]
    output = completion_log_probs(model, batch, 0.7, entropy_gradient=False)
    assert output.values.requires_grad and not output.entropy.requires_grad
    for row, sample in enumerate(samples):
        n, m = len(sample.prompt.fields["prompt_ids"]), len(sample.action.token_ids)
        ids = torch.tensor([[*sample.prompt.fields["prompt_ids"], *sample.action.token_ids]])
        log_probs = (model(ids).logits[0, n - 1 : -1].float() / 0.7).log_softmax(-1)
        expected = log_probs.gather(1, ids[0, n:, None])[:, 0]
        torch.testing.assert_close(output.values[row, :m], expected, rtol=1e-5, atol=1e-5)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        torch.testing.assert_close(output.entropy[row, :m], entropy, rtol=1e-5, atol=1e-5)
        assert output.values[row, m:].eq(0).all() and output.entropy[row, m:].eq(0).all()
        torch.testing.assert_close(batch["rollout_log_probs"][row, :m], sample.action.log_probs)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("size", "rollout_is"), [(1, None), (2, None), (4, None), (1, "token"), (1, "sequence")])
def test_micro_batch_without_rewards_keeps_gradient(size: int, rollout_is: Literal["token", "sequence"] | None) -> None:
    """Its forward pass takes part in FSDP's collectives but not in the loss."""
    trajectories = make_trajectories()[:GROUP_SIZE]
    for number, trajectory in enumerate(trajectories):
        trajectory.advantage = number - 1.5
        if number % 2:
            trajectory.reward = Reward({}, {"r": RewardFailure("broken")})

    algorithm = TokenAlgorithmConfig(rollout_correction=RolloutCorrectionConfig(rollout_is=rollout_is))

    def gradient(chosen: list[Trajectory], micro_batch_size: int) -> torch.Tensor:
        model = make_model()
        context: dict[str, Any] = {
            "autocast": nullcontext,
            "device": "cpu",
            "entropy_gradient": False,
            "reference": None,
        }
        engine: Any = SimpleNamespace(dtype=None)
        policy = TokenPolicy(model, None, engine, TokenBatcher(0), REFERENCE_SAMPLING, seed=0, **context)  # type: ignore[arg-type]
        sizes = {"group_size": GROUP_SIZE, "num_mini_batches": 1, "max_decisions": 12, "num_ranks": 1}
        step = grpo_step(
            policy, Machine(), algorithm, TokenActorConfig(), **sizes, micro_batch_size=micro_batch_size,
            optimizer_step=lambda loss: 0.0,
        )  # fmt: skip
        step.update(chosen)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    found, expected = gradient(trajectories, size), gradient(trajectories[::2], 4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert expected.count_nonzero() > 100


def test_sample_seeds_are_unique_and_fit_31_bits() -> None:
    """Every component changes the seed. Engines accept seeds of 31 bits."""
    others = ((2, 2, "p", 0), (1, 3, "p", 0), (1, 2, "q", 0), (1, 2, "p", 1))
    seeds = {sample_seed(1, 2, "p", 0), *(sample_seed(*parts) for parts in others)}
    assert len(seeds) == 5 and max(seeds) < 1 << 31 and sample_seed(1, 2, "p", 0) in seeds


def test_completions_are_independent_of_batch(model: PreTrainedModel, pad: int) -> None:
    """A resumed run generates the same completions as an uninterrupted one, for any batching."""
    wanted = requests(5, 20, 11, 7)
    together = generated(engine_of(model, pad), wanted)
    alone = generated(engine_of(model, pad, batch_size=1), wanted)
    mixed = generated(engine_of(model, pad, batch_size=3), requests(30, 2) + wanted)[2:]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone] == [c.token_ids for c in mixed]
    assert len({completion.token_ids for completion in together}) == 4
    other = generated(engine_of(model, pad), [replace(request, seed=request.seed + 1) for request in wanted])
    assert all(a.token_ids != b.token_ids for a, b in zip(together, other))


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, temperature=0.0), SamplingArgs(1.0, 1.0, -1, 4)])
def test_engine_log_probs_equal_model_log_probs(model: PreTrainedModel, pad: int, sampling: SamplingArgs) -> None:
    """Greedy tokens are the most likely ones."""
    for request, completion in zip(requests(5, 20), generated(engine_of(model, pad), requests(5, 20), sampling)):
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
        tokens = torch.tensor(completion.token_ids)
        log_probs = (logits / (sampling.temperature or 1)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(completion.log_probs, log_probs, rtol=1e-4, atol=1e-4)
        if sampling.temperature == 0:
            assert logits.argmax(-1).tolist() == list(completion.token_ids)


def test_interrupted_engine_ends_without_the_current_batch(model: PreTrainedModel, pad: int) -> None:
    engine, calls = engine_of(model, pad, batch_size=2, end=-1), iter(range(100))
    engine.is_interrupted = lambda group: next(calls) >= SAMPLING.max_tokens + 4  # in the second batch
    assert len(dict(engine.generate(requests(9, 8, 7, 6), SAMPLING))) == 2
    assert next(calls) < 2 * SAMPLING.max_tokens


def test_completions_end_at_eos_or_limit(model: PreTrainedModel, pad: int) -> None:
    (whole,) = generated(engine_of(model, pad), requests(5))
    assert whole.truncated and len(whole.token_ids) == 12
    (cut,) = generated(engine_of(model, pad, end=whole.token_ids[4]), requests(5))
    first = whole.token_ids.index(whole.token_ids[4])
    assert cut.token_ids == whole.token_ids[: first + 1] and not cut.truncated
    assert len(cut.log_probs) == len(cut.token_ids)


def test_token_frequencies_match_probabilities() -> None:
    """Checked with 20,000 tokens; tokens outside top_k or top_p never occur, and log-probabilities ignore both."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, -torch.inf]]).expand(20_000, -1)
    for top_p, top_k, kept in ((1.0, -1, 4), (1.0, 2, 2), (0.6, -1, 2)):
        sampling = SamplingArgs(2.0, top_p, top_k, 1)
        processor = SeededHFLogitsProcessor(range(20_000), sampling, "cpu")
        chosen = processor(torch.zeros(20_000, 1, dtype=torch.long), logits.clone()).argmax(-1)
        expected = torch.zeros(5)
        expected[4 - kept : 4] = (logits[0, 4 - kept : 4] / 2).softmax(-1)
        found = torch.bincount(chosen, minlength=5) / 20_000
        assert (found - expected).abs().max() < 0.02 and found[expected == 0].eq(0).all()
        log_probs = (logits[0] / 2).log_softmax(-1)[chosen]
        torch.testing.assert_close(processor.log_probs()[:, 0], log_probs, rtol=1e-4, atol=1e-4)


def test_random_number_zero_samples_no_filtered_token() -> None:
    logits, uniforms = torch.tensor([[-torch.inf, 0.0, 3.0, 2.0]]), torch.zeros(1, dtype=torch.float64)
    for top_k, expected in ((-1, 1), (2, 2)):
        tokens, log_probs = sample_tokens(logits, uniforms, SamplingArgs(1.0, 1.0, top_k, 1))
        assert tokens.item() == expected and log_probs.isfinite().all()


def test_prompt_of_group_is_computed_once(model: PreTrainedModel, pad: int) -> None:
    """The completions equal those of each request alone."""
    wanted = [SampleRequest(prompt_of(length), seed) for length in (9, 14, 3) for seed in (1, 2, 3)]
    engine, rows = engine_of(model, pad, batch_size=9), []
    hook = model.register_forward_pre_hook(lambda *a: rows.append(tuple(a[2]["input_ids"].shape)), with_kwargs=True)
    together = generated(engine, wanted)
    hook.remove()
    assert rows[:2] == [(3, 13), (9, 1)]
    alone = generated(engine_of(model, pad, batch_size=1), wanted)
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    for one, other in zip(together, alone):
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_adapters", [False, True])
def test_generation_config_of_model_is_ignored(has_adapters: bool) -> None:
    """Its settings would change the sampling distribution. They are restored afterwards."""
    base = family("qwen2")
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2)) if has_adapters else base
    expected = [completion.token_ids for completion in generated(engine_of(model, 0), requests(5, 20))]
    base.generation_config.update(repetition_penalty=5.0, do_sample=True, top_k=2, no_repeat_ngram_size=1)
    before = base.generation_config
    assert [completion.token_ids for completion in generated(engine_of(model, 0), requests(5, 20))] == expected
    assert base.generation_config is before and before.top_k == 2


def family(name: str) -> PreTrainedModel:
    """A tiny model of `PACKING_FAMILIES` or `PADDING_FAMILIES`, with uneven probabilities."""
    model_type, settings = {**PACKING_FAMILIES, **PADDING_FAMILIES, **HYBRID}[name]
    config = AutoConfig.for_model(model_type, **settings, vocab_size=400, eos_token_id=3, pad_token_id=0)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


HYBRID = {
    "lfm2": ("lfm2", {**SHAPE, "layer_types": ["conv", "full_attention"]}),
    "qwen3_5": ("qwen3_5_text", {**HEAD, "layer_types": ["linear_attention", "full_attention"]}),
}


@pytest.mark.parametrize("name", ["mistral with a window", "gemma3", "gpt_oss", "gemma2", "jamba", "mamba", *HYBRID])
def test_prompt_sharing_works_with_every_cache_type(name: str) -> None:
    """Caches have sliding windows shorter than the prompt, recurrent states, or both."""
    model = family(name)
    wanted = [SampleRequest(prompt_of(length), seed) for length in (40, 60, 5) for seed in (1, 2)]
    together, alone = (generated(engine_of(model, 0, batch_size=size), wanted) for size in (6, 1))
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    for one, other, request in zip(together, alone, wanted):
        torch.testing.assert_close(one.log_probs, other.log_probs, rtol=1e-3, atol=1e-3)
        ids = torch.tensor([[*request.prompt_ids, *one.token_ids]])
        logits = model(ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float() / SAMPLING.temperature
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(one.log_probs, log_probs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["mistral with a window", "gemma3"])
def test_model_that_packs_generates_as_before(name: str) -> None:
    """Also in a batch without padding, for which transformers drops the mask and relies on the attention's window."""
    model, wanted = family(name), [SampleRequest(prompt_of(40)[number:] + prompt_of(number), 1) for number in range(3)]
    expected = generated(engine_of(model, 0), wanted)
    attend_within_samples(model)
    assert [c.token_ids for c in generated(engine_of(model, 0), wanted)] == [c.token_ids for c in expected]
    assert model.config._attn_implementation == PACKED_SDPA


def test_dropout_is_disabled() -> None:
    """This covers modules and attention calls; the exported configuration is unchanged."""
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.5,
    )  # fmt: skip
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.5, r=2)).train()
    ids = torch.arange(20)[None]
    assert not torch.equal(model(ids).logits, model(ids).logits)
    disable_dropout(model)
    assert torch.equal(model(ids).logits, model(ids).logits) and model.training
    assert model.config.attention_dropout == 0.5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_are_reported(model: PreTrainedModel, pad: int, bad: float, temperature: float) -> None:
    """The error must not be an index out of range."""
    weight = model.get_output_embeddings().weight
    kept = weight.detach().clone()
    weight.data[3] = bad
    try:
        with pytest.raises(UserError, match="logits are not finite; check its weights$"):
            generated(engine_of(model, pad), requests(5), replace(SAMPLING, temperature=temperature))
    finally:
        weight.data.copy_(kept)
