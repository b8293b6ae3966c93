"""The experts of a mixture, of which only those run that a token was routed to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

MOST_COPIED = 1 << 17
"""Bytes of an expert's weights up to which they are copied for one product. With 384 KiB decoding took 1.4 times as
long by copies, so the bound lies below; smaller ones were not compared. A GPU would have to be waited for to know which
experts were chosen, so that it always copies."""


class Experts(Protocol):
    """What is used of `Qwen3VLMoeTextExperts`: weights (experts, hidden, 2 * inner) and (experts, inner, hidden)."""

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor
    act_fn: Callable[[torch.Tensor], torch.Tensor]


def bytes_of_one(experts: Experts) -> int:
    """Of the weights of one expert."""
    return sum(weights[0].numel() * weights.element_size() for weights in (experts.gate_up_proj, experts.down_proj))


class RoutedExperts(nn.Module):
    """In place of `Qwen3VLMoeTextExperts`, which runs every expert on every token unless it is being trained.

    Tokens are sorted by expert, so that each expert sees its own in one piece. Sums over a token's experts are in the
    order of the router's, whatever the batch, so results repeat on a GPU too.

    Args:
        experts: the module that it stands for.
    """

    _experts: Experts

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_experts", experts)  # not as a child: its parameters belong to the model

    def forward(
        self, hidden_states: torch.Tensor, routing_weights: torch.Tensor, router_indices: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum over each token's experts, shaped as the hidden states.

        Args:
            hidden_states: (batch, seq, hidden).
            routing_weights: (batch * seq, experts), 0 for those that the token was not routed to.
            router_indices: (batch * seq, k), the experts of each token.
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        run = self._of_one_token if len(tokens) == 1 else self._of_many_tokens
        outputs, weights = run(tokens, router_indices), routing_weights.gather(1, router_indices)
        return (outputs * weights[..., None]).sum(1).reshape(hidden_states.shape)

    def _of_many_tokens(self, tokens: torch.Tensor, router_indices: torch.Tensor) -> torch.Tensor:
        """(tokens, k, hidden) of tokens (tokens, hidden)."""
        experts, k = self._experts, router_indices.shape[1]
        order = router_indices.flatten().argsort(stable=True)
        sorted_inputs = tokens[order // k]
        counts = torch.bincount(router_indices.flatten(), minlength=experts.gate_up_proj.shape[0]).tolist()
        # taken apart at once: the gradient of one expert taken by its number is as large as that of all
        weights = zip(experts.gate_up_proj.unbind(), experts.down_proj.unbind())
        outputs = [self._run(part, *each) for part, each in zip(sorted_inputs.split(counts), weights) if len(part)]
        unsorted = torch.empty_like(sorted_inputs)
        unsorted[order] = torch.cat(outputs)
        return unsorted.view(-1, k, tokens.shape[-1])

    def _of_one_token(self, token: torch.Tensor, router_indices: torch.Tensor) -> torch.Tensor:
        """The same of one token, as in decoding: no expert has two, so all can be one product of copied weights.

        Where copying takes longer than a few more operations, each expert runs where it lies.
        """
        experts, chosen = self._experts, router_indices[0]
        if token.device.type == "cpu" and bytes_of_one(experts) > MOST_COPIED:
            outputs = [self._run(token, experts.gate_up_proj[k], experts.down_proj[k]) for k in chosen.tolist()]
            return torch.stack(outputs, dim=1)
        gate, up = torch.matmul(token, experts.gate_up_proj[chosen]).chunk(2, dim=-1)  # (k, 1, inner)
        return torch.matmul(up * experts.act_fn(gate), experts.down_proj[chosen]).transpose(0, 1)

    def _run(self, inputs: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> torch.Tensor:
        """One expert on (tokens, hidden)."""
        gate, up = (inputs @ gate_up_proj).chunk(2, dim=-1)
        return (up * self._experts.act_fn(gate)) @ down_proj
