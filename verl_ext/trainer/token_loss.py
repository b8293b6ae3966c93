"""The forward pass of supervised fine-tuning: from a micro-batch to the sum of its tokens' cross-entropy."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from verl_ext.data.batching import MicroBatch
from verl_ext.trainer.hardware import autocast
from verl_ext.trainer.loss_head import LossHead
from verl_ext.trainer.packed_attention import packed_arguments


class TokenLoss:
    """Sums the cross-entropy over the tokens that are learnt.

    Args:
        model: sharded.
        head: its output layer, where that makes the loss; None where the logits are made as a whole.
        precision: of the forward pass.
        device_name: cuda, npu or cpu.
    """

    def __init__(self, model: torch.nn.Module, head: LossHead | None, precision: torch.dtype, device_name: str) -> None:
        self._model, self.head, self.precision, self._device = model, head, precision, device_name

    def __call__(self, micro_batch: MicroBatch) -> torch.Tensor:
        """The loss of a micro-batch, a scalar with gradient."""
        learnt = F.pad(micro_batch["loss_mask"][:, 1:], (0, 1)).bool()  # token t is predicted from those before it
        places = self._moved(learnt.flatten().nonzero()[:, 0])  # found on the CPU, so that no GPU is waited for
        targets = self._moved(micro_batch["input_ids"].roll(-1, dims=1)[learnt])
        if self.head is None:
            logits = self.logits(micro_batch)
            return F.cross_entropy(logits.flatten(0, 1)[places].float(), targets, reduction="sum")
        with self.head.asked_for(places, targets):
            return self.logits(micro_batch)

    def logits(self, micro_batch: MicroBatch) -> torch.Tensor:
        """What the model says of each token (batch, seq, vocab)."""
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
