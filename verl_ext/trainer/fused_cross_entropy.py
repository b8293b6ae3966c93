"""The cross-entropy of a language model, computed in chunks without materializing all logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from verl_ext.data.batching import MicroBatch, packed_arguments
from verl_ext.trainer.config import chunk_tokens
from verl_ext.trainer.device import autocast

LogitGradients = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Given a chunk's logits and labels, returns the summed loss, the logits' gradients times sums, and these sums."""
LOSS_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest accepted difference from the loss of the rounded logits, in nats per token."""


class TokenLoss:
    """Runs the forward pass and sums the cross-entropy over the loss tokens of a micro-batch.

    Args:
        model: the sharded model.
        head: its output layer if that computes the loss; None computes the loss from logits.
    """

    def __init__(
        self, model: torch.nn.Module, head: FusedLinearCrossEntropy | None, precision: torch.dtype, device_name: str
    ) -> None:
        self._model, self.head, self.precision, self._device = model, head, precision, device_name

    def __call__(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of a micro-batch, a scalar with gradient."""
        predicts = F.pad(micro_batch["loss_mask"][:, 1:], (0, 1)).bool()  # (batch, seq): the next token counts
        positions = self._moved(predicts.flatten().nonzero()[:, 0])  # computed on the CPU: nothing waits for a GPU
        labels = self._moved(micro_batch["input_ids"].roll(-1, dims=1)[predicts])
        if self.head is None:
            logits = self.logits(micro_batch)
            return F.cross_entropy(logits.flatten(0, 1)[positions].float(), labels, reduction="sum")
        with self.head.computing_loss(positions, labels):
            return self.logits(micro_batch)

    def logits(self, micro_batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the model's output for each token, (batch, seq, vocab)."""
        inputs: dict[str, Any] = {
            name: self._moved(tensor)
            for name, tensor in micro_batch.items()
            if name not in ("loss_mask", "sample_lengths")
        }
        if "sample_lengths" in micro_batch:
            inputs |= packed_arguments(micro_batch["sample_lengths"], self._device)
        with autocast(self.precision, self._device):
            return self._model(**inputs, use_cache=False).logits

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device, non_blocking=True)


class FusedLinearCrossEntropy(nn.Linear):
    """Output layer of a language model that returns the loss instead of logits inside `computing_loss`.

    It replaces the model's own layer, so the weights are gathered, tied and saved as before. With `model.use_liger` on
    a GPU, Liger's kernel computes the loss.

    Args:
        linear: the model's own layer; this layer shares its parameters.
        by_liger: whether to use Liger's fused linear cross-entropy.
        compiles: whether to compile the operations on a chunk's logits, which reduces the passes over them to a third.
    """

    def __init__(self, linear: nn.Linear, by_liger: bool = False, compiles: bool = False) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._by_liger = by_liger
        self._logit_gradients = _compiled_gradients() if compiles else _unscaled_gradients
        self._positions_and_labels: tuple[torch.Tensor, torch.Tensor] | None = None

    @contextmanager
    def computing_loss(self, positions: torch.Tensor, labels: torch.Tensor) -> Iterator[None]:
        """Make forward passes return the summed cross-entropy, a scalar, instead of logits.

        Args:
            positions: (num_loss_tokens,), indices into the flattened (batch, seq) at which to predict the next token.
            labels: (num_loss_tokens,), tokens to predict.
        """
        self._positions_and_labels = positions, labels
        try:
            yield
        finally:
            self._positions_and_labels = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (batch, seq, vocab), or the loss inside `computing_loss`."""
        if self._positions_and_labels is None:
            return super().forward(hidden)
        positions, labels = self._positions_and_labels
        selected = hidden.reshape(-1, hidden.shape[-1])[positions]  # (num_loss_tokens, hidden)
        if self._by_liger:
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

            return LigerFusedLinearCrossEntropyLoss(reduction="sum")(self.weight, selected, labels, self.bias)
        needs_grad = torch.is_grad_enabled()
        return _SummedCrossEntropy.apply(selected, self.weight, self.bias, labels, needs_grad, self._logit_gradients)


def install_fused_loss(model: PreTrainedModel, by_liger: bool, compiles: bool) -> FusedLinearCrossEntropy | None:
    """Replace the model's output layer with a `FusedLinearCrossEntropy`; None if it is not a plain linear layer."""
    linear = model.get_output_embeddings()
    if type(linear) is not nn.Linear:
        return None
    layer = FusedLinearCrossEntropy(linear, by_liger, compiles)
    model.set_output_embeddings(layer)
    return layer


@torch.no_grad()
def fused_loss_error(
    logits_of: Callable[[MicroBatch], torch.Tensor],
    loss_of: Callable[[MicroBatch], torch.Tensor],
    micro_batch: MicroBatch,
) -> float:
    """Return the difference between the fused loss and the cross-entropy of the logits, in nats per token; collective.

    A model may scale or cap its logits after the output layer, which a list of architectures cannot cover.

    Args:
        logits_of: returns the logits (batch, seq, vocab) of a micro-batch.
        loss_of: returns the summed loss of a micro-batch.
        micro_batch: one sample, with all tokens in the loss.
    """
    logits, labels = logits_of(micro_batch)[0, :-1].float(), micro_batch["input_ids"][0, 1:]
    plain = F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
    return float((loss_of(micro_batch).float() - plain).abs()) / len(labels)


class _SummedCrossEntropy(torch.autograd.Function):
    """Sum over tokens of the cross-entropy of softmax(hidden weight^T + bias), chunk by chunk.

    The forward pass also computes the gradients, so that no chunk's logits are kept or computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        needs_grad: bool,
        logit_gradients: LogitGradients,
    ) -> torch.Tensor:
        needed = [needs_grad and each for each in ctx.needs_input_grad]
        total = torch.zeros((), device=hidden.device)
        grads = _Gradients(
            torch.empty_like(hidden) if needed[0] else None,
            torch.zeros(weight.shape, device=weight.device) if needed[1] else None,  # fp32, because it sums chunks
            torch.zeros(bias.shape, device=bias.device) if bias is not None and needed[2] else None,
        )
        size = chunk_tokens(weight.shape[0], on_gpu=weight.device.type != "cpu")
        for first in range(0, len(hidden), size):
            part = slice(first, first + size)
            loss, of_logits, sums = logit_gradients(F.linear(hidden[part], weight, bias), labels[part])
            total += loss
            if any(needed):
                grads.add(hidden[part], weight, of_logits, sums, part)
            del of_logits  # otherwise it would occupy memory until the next chunk is computed
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
            None,
        )


@dataclass(frozen=True)
class _Gradients:
    """Gradients summed over chunks; None for those that are not needed."""

    of_hidden: torch.Tensor | None
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None

    def add(
        self, hidden: torch.Tensor, weight: torch.Tensor, of_logits: torch.Tensor, sums: torch.Tensor, part: slice
    ) -> None:
        """Add the gradients of a chunk.

        Args:
            hidden: (tokens, hidden), hidden states of the chunk.
            weight: (vocab, hidden), weight of the layer.
            of_logits: (tokens, vocab), gradients of the chunk's logits times `sums`.
            sums: (tokens, 1); the narrow factor of each product is divided by them, not the wide one.
            part: the chunk's slice of the tokens.
        """
        rounded = of_logits.to(weight.dtype)
        if self.of_hidden is not None:
            self.of_hidden[part] = (rounded @ weight) / sums
        if self.of_weight is not None:
            _add_product(self.of_weight, rounded.T, (hidden / sums).to(weight.dtype))
        if self.of_bias is not None:
            self.of_bias.add_((of_logits / sums).sum(0))


def _unscaled_gradients(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the summed loss and, in place, the logits' gradients for `_Gradients.add`.

    With e = exp(logits - peak) and s its sum over the vocabulary, the gradient is (e - s at the label) / s.

    Args:
        logits: (tokens, vocab), logits of a chunk; overwritten if they are fp32.
        labels: (tokens,).
    """
    logits = logits.float()
    peak = logits.amax(-1, keepdim=True)
    label_logits = logits.gather(1, labels[:, None]) - peak
    wide = logits.sub_(peak).exp_()
    sums = wide.sum(-1, keepdim=True)
    loss = (sums.log() - label_logits).sum()
    return loss, wide.scatter_add_(1, labels[:, None], -sums), sums


def _softmax_gradients(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Like `_unscaled_gradients`, for torch.compile: two passes over the logits, in their own dtype."""
    wide = logits.float()
    peak = wide.amax(-1, keepdim=True)
    exps = (wide - peak).exp()
    sums = exps.sum(-1, keepdim=True)
    loss = (sums.log() + peak - wide.gather(1, labels[:, None])).sum()
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    return loss, (exps - torch.where(is_label, sums, 0.0)).to(logits.dtype), sums


def _compiled_gradients() -> LogitGradients:
    """Compile `_softmax_gradients` for chunks of any length."""
    compiled = torch.compile(_softmax_gradients)

    def gradients_of(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        torch._dynamo.mark_static(logits, 1)  # otherwise dynamic, too, because of `compile_blocks`
        return compiled(logits, labels)

    return gradients_of


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right, without a copy if the dtypes allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
