"""The cross-entropy of a language model without its full logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from verl_ext.trainer.config import CHUNK_ELEMENTS, MIN_CHUNK_TOKENS


class LossHead(nn.Linear):
    """The output layer of a language model, which gives the loss instead of logits while it knows the targets.

    It is in the place of the model's own, so that the weights are gathered, tied and saved as ever. With
    `model.use_liger` on a GPU, Liger's kernel does the same work.

    Args:
        linear: the model's own layer, whose parameters it shares.
        by_liger: whether Liger's fused linear cross-entropy is used.
    """

    def __init__(self, linear: nn.Linear, by_liger: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._by_liger = by_liger
        self._asked: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def asked_for(self, places: torch.Tensor, targets: torch.Tensor) -> Iterator[None]:
        """Have forward passes give the sum of the cross-entropy, a scalar, where logits would be.

        Args:
            places: numbers, in the flattened (batch, seq), of the tokens from which is predicted (num_learnt,).
            targets: the tokens to predict (num_learnt,).
        """
        self._asked = places, targets
        try:
            yield
        finally:
            self._asked = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (batch, seq, vocab), or the loss while it is asked for."""
        if self._asked is None:
            return super().forward(hidden)
        places, targets = self._asked
        learnt = hidden.reshape(-1, hidden.shape[-1])[places]
        if self._by_liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(reduction="sum")(self.weight, learnt, targets, self.bias)
        return _SummedCrossEntropy.apply(learnt, self.weight, self.bias, targets, torch.is_grad_enabled())


def install_loss_head(model: PreTrainedModel, by_liger: bool) -> LossHead | None:
    """Put a `LossHead` in the place of the output layer; None where that is no plain one."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        return None
    head = LossHead(linear, by_liger)
    model.set_output_embeddings(head)
    return head


class _SummedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross-entropy of softmax(hidden weight^T + bias), chunk by chunk.

    The gradients are made on the way, so that no chunk's logits are kept or computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        learns: bool,
    ) -> torch.Tensor:
        wants = [learns and needed for needed in ctx.needs_input_grad]
        total = torch.zeros((), device=hidden.device)
        grads = _Gradients(
            torch.empty_like(hidden) if wants[0] else None,
            torch.zeros(weight.shape, device=weight.device) if wants[1] else None,  # in fp32: it sums up chunks
            torch.zeros(bias.shape, device=bias.device) if bias is not None and wants[2] else None,
        )
        size = max(MIN_CHUNK_TOKENS, CHUNK_ELEMENTS // weight.shape[0])
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            total += grads.add(hidden[part], weight, bias, targets[part], part)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(grads.of_hidden, grads.of_weight, grads.of_bias)
        return total

    @staticmethod
    def backward(ctx: Any, scale: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.saved_tensors
        return (
            None if of_hidden is None else of_hidden.mul_(scale),
            None if of_weight is None else of_weight.mul_(scale).to(ctx.dtypes[0]),
            None if of_bias is None else of_bias.mul_(scale).to(ctx.dtypes[1]),
            None,
            None,
        )


@dataclass(frozen=True)
class _Gradients:
    """What the chunks come to; None for what is not wanted."""

    of_hidden: torch.Tensor | None
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None

    def add(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        part: slice,
    ) -> torch.Tensor:
        """Loss of a chunk; its part of the gradients is added.

        With e = exp(logits - peak) and s their sum over the vocabulary, the gradient of the logits is (e - s at the
        target) / s. The division is made on the narrow side of the products, so that the wide e is passed over less.
        """
        logits = F.linear(hidden, weight, bias).float()  # (tokens, vocab)
        peak = logits.amax(-1, keepdim=True)
        of_target = logits.gather(1, targets[:, None]) - peak
        wide = logits.sub_(peak).exp_()
        sums = wide.sum(-1, keepdim=True)
        loss = (sums.log() - of_target).sum()
        if self.of_hidden is None and self.of_weight is None and self.of_bias is None:
            return loss
        wide.scatter_add_(1, targets[:, None], -sums)
        rounded = wide.to(weight.dtype)
        if self.of_hidden is not None:
            self.of_hidden[part] = (rounded @ weight) / sums
        if self.of_weight is not None:
            _add_product(self.of_weight, rounded.T, (hidden / sums).to(weight.dtype))
        if self.of_bias is not None:
            self.of_bias.add_((wide / sums).sum(0))
        return loss


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, without a copy where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
