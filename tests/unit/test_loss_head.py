"""The loss in parts is that of the logits, with its gradients, and packed samples do not know of each other."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Gemma2Config, GemmaConfig, MistralConfig, Qwen2Config, Qwen3Config

from verl_ext.data.batching import MicroBatch, MicroBatcher, pack
from verl_ext.errors import UserError
from verl_ext.trainer import loss_head
from verl_ext.trainer.forward_check import check_packing, loss_heads_error, trial_samples
from verl_ext.trainer.loss_head import LossHead, install_loss_head
from verl_ext.trainer.packed_attention import PACKED_SDPA
from verl_ext.trainer.token_loss import TokenLoss

SMALL = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64},
}
CONFIGS = {
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL),
    "gemma": GemmaConfig(**SMALL),
    "window": MistralConfig(**SMALL, sliding_window=4),
}


def model_of(name: str, attention: str = PACKED_SDPA) -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).float().train()


def loss_of(model: nn.Module, head: LossHead | None = None) -> TokenLoss:
    return TokenLoss(model, head, torch.float32, "cpu")


def samples() -> list[dict]:
    """With different parts that are learnt, one of which is nothing."""
    made = [{**sample, "row": row} for row, sample in enumerate(trial_samples(97))]
    made[0]["loss_mask"][:3] = 0
    made[1]["loss_mask"][:] = 0
    return made


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 5, 300])
def test_the_loss_in_parts_is_that_of_the_logits(
    biased: bool, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_head, "CHUNK_ELEMENTS", 50 * 97)  # 128 tokens at a time
    torch.manual_seed(0)
    linear = nn.Linear(16, 97, bias=biased)
    head = LossHead(linear)
    hidden = torch.randn(2, 400, 16, requires_grad=True)
    places, targets = torch.randperm(800)[:num_tokens], torch.randint(0, 97, (num_tokens,))
    plain = F.cross_entropy(linear(hidden).flatten(0, 1)[places], targets, reduction="sum")
    wanted = torch.autograd.grad(3 * plain, [hidden, *linear.parameters()])
    with head.asked_for(places, targets):
        loss = head(hidden)
    (3 * loss).backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    got = [hidden.grad, *(parameter.grad for parameter in linear.parameters())]
    for gradient, expected in zip(got, wanted, strict=True):
        assert torch.allclose(gradient, expected, atol=1e-4)
    assert torch.equal(head(hidden), linear(hidden))  # logits again, once nobody asks


def test_a_frozen_head_makes_no_gradient_for_its_weights() -> None:
    head = LossHead(nn.Linear(16, 97).requires_grad_(False))
    hidden = torch.randn(1, 4, 16, requires_grad=True)
    with head.asked_for(torch.tensor([0, 1]), torch.tensor([5, 6])):
        head(hidden).backward()
    assert head.weight.grad is None and hidden.grad.abs().sum() > 0
    with torch.no_grad(), head.asked_for(torch.tensor([0]), torch.tensor([5])):
        assert not head(hidden).requires_grad


def test_the_head_shares_the_models_weights_and_names() -> None:
    model = model_of("qwen2")
    names = set(model.state_dict())
    head = install_loss_head(model, by_liger=False)
    assert set(model.state_dict()) == names
    assert head is model.get_output_embeddings() and head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_samples_are_as_if_alone(name: str) -> None:
    """Logits, loss and gradients; beside them plain attention over padded rows."""
    packed, padded = model_of(name), model_of(name, "sdpa")
    logits = loss_of(packed).logits
    alone = torch.cat([logits(pack([sample])) for sample in samples()], dim=1)
    assert torch.allclose(logits(pack(samples())), alone, atol=1e-5)
    head = install_loss_head(packed, by_liger=False)
    losses = []
    for loss, packs in ((loss_of(packed, head), True), (loss_of(padded), False)):
        losses.append(loss(MicroBatcher(0, packs).micro_batch(samples())))
        losses[-1].backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for one, other in zip(packed.parameters(), padded.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-5)


def test_a_model_that_mixes_packed_samples_is_refused() -> None:
    good = loss_of(model_of("qwen2").eval()).logits
    check_packing(good, 97, torch.float32, "Good")

    def leaking(micro_batch: MicroBatch) -> torch.Tensor:
        logits = good(micro_batch)
        return logits + logits.cumsum(1) * 0.01

    with pytest.raises(UserError, match="Leaking does not keep packed samples apart: .* set data.packing=false"):
        check_packing(leaking, 97, torch.float32, "Leaking")

    check_packing(lambda micro_batch: good(micro_batch) * 0, 97, torch.float32, "Fresh")  # its head is all zeros

    def narrow(micro_batch: MicroBatch) -> torch.Tensor:
        raise TypeError("forward() got an unexpected keyword argument 'sample_lengths'")

    with pytest.raises(UserError, match="cannot take packed samples .* set data.packing=false"):
        check_packing(narrow, 97, torch.float32, "Narrow")


def test_attention_that_sdpa_does_not_have_is_refused() -> None:
    config = Gemma2Config(**SMALL, attn_logit_softcapping=5.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_SDPA).float().eval()
    with pytest.raises(UserError, match="cannot take packed samples .*caps scores.*; set data.packing=false"):
        check_packing(loss_of(model).logits, 97, torch.float32, "Gemma2ForCausalLM")


def test_a_model_that_changes_its_logits_is_found_out() -> None:
    model = model_of("qwen2").eval()
    loss = loss_of(model, install_loss_head(model, by_liger=False))
    assert loss_heads_error(loss.logits, loss, pack, 97) < 1e-5

    def capped(micro_batch: MicroBatch) -> torch.Tensor:
        return 0.5 * torch.tanh(loss.logits(micro_batch) / 0.5)

    assert loss_heads_error(capped, loss, pack, 97) > 1e-3
