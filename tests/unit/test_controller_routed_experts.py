"""The experts that count, against every expert run and weighed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from verl_ext.controller.adapters import routed_experts
from verl_ext.controller.adapters.routed_experts import RoutedExperts

HIDDEN, INNER, EXPERTS, K = 24, 40, 6, 3


@pytest.mark.parametrize("num_tokens", [1, 7])
@pytest.mark.parametrize("most_copied", [0, 1 << 30])
def test_only_routed_experts_run_and_give_what_all_would(
    num_tokens: int, most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed_experts, "MOST_COPIED", most_copied)
    generator = torch.Generator().manual_seed(num_tokens)
    gate_up, down = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((EXPERTS, HIDDEN, 2 * INNER), (EXPERTS, INNER, HIDDEN))
    )
    experts = SimpleNamespace(gate_up_proj=gate_up, down_proj=down, act_fn=torch.nn.functional.silu)
    tokens = torch.randn(num_tokens, HIDDEN, generator=generator, dtype=torch.float64)
    top, chosen = torch.randn(num_tokens, EXPERTS, generator=generator, dtype=torch.float64).softmax(-1).topk(K)
    weights = torch.zeros(num_tokens, EXPERTS, dtype=torch.float64).scatter(1, chosen, top)
    gate, up = torch.einsum("th,ehi->tei", tokens, gate_up).chunk(2, dim=-1)
    everything = torch.einsum("tei,eih->teh", up * torch.nn.functional.silu(gate), down)
    wanted = (everything * weights[..., None]).sum(1)
    unused = [expert for expert in range(EXPERTS) if expert not in chosen.flatten().tolist()]
    gate_up[unused] = down[unused] = torch.nan  # whatever runs them tells
    found = RoutedExperts(experts)(tokens[None], weights, chosen)
    torch.testing.assert_close(found[0], wanted, rtol=1e-12, atol=1e-12)


def test_the_bytes_of_one_expert_are_of_both_its_weights() -> None:
    experts = SimpleNamespace(gate_up_proj=torch.zeros(4, 3, 10), down_proj=torch.zeros(4, 5, 3, dtype=torch.float32))
    assert routed_experts.bytes_of_one(experts) == 4 * (30 + 15)
