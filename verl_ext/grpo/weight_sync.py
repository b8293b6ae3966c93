"""Trained weights for an engine that has its own: sharded parameters to whole tensors, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import PreTrainedModel

from verl_ext.checkpoint.hf_tensors import ExportedTensor, exported_tensors, merge_rows
from verl_ext.distributed import is_sharded, on_rank_zero, shard_rows, to_full, to_local

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _Slot:
    """A tensor's part of the flat tensor that each rank contributes.

    Attributes:
        weights: tensors of the export that are made of it.
        shape: of the whole tensor.
        dtype: that it is sent in.
        rows_per_rank: the last ranks may have fewer.
    """

    weights: list[ExportedTensor]
    shape: torch.Size
    dtype: torch.dtype
    rows_per_rank: int

    @property
    def numel(self) -> int:
        """Elements of one rank's part, with padding."""
        return self.rows_per_rank * self.shape[1:].numel() if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize

    def exported(self, whole: torch.Tensor) -> Bucket:
        """The tensors of the export that are made of the whole tensor."""
        return [(weight.name, weight.of_rows(whole, 0)[1].reshape(weight.shape(self.shape))) for weight in self.weights]


class WeightSync:
    """Gathers a sharded model's weights as its export has them: LoRA adapters merged, tied tensors once."""

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype, device: str, bucket_bytes: int) -> None:
        """Plan the buckets; collective.

        Args:
            model: as FSDP2 modules over all ranks.
            dtype: that the tensors are sent in; integers keep theirs.
            device: of the tensors that are sent.
            bucket_bytes: largest bucket, unless a single tensor is larger.
        """
        self._model, self._dtype, self._device = model, dtype, device
        self._num_ranks = dist.get_world_size()
        weights = on_rank_zero(lambda: exported_tensors(model))
        self._buckets = list(self._plan(weights, bucket_bytes))

    @property
    def num_buckets(self) -> int:
        """Buckets of a sync."""
        return len(self._buckets)

    @property
    def num_bytes(self) -> int:
        """Bytes that an engine receives in a sync."""
        return sum(slot.num_bytes for bucket in self._buckets for slot in bucket)

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket]:
        """Names and whole tensors; no later bucket reuses their memory; collective."""
        state = self._model.state_dict()
        for slots in self._buckets:
            tensors = self._gather(slots, state) if self._num_ranks > 1 else self._own(slots, state)
            yield [named for slot, tensor in zip(slots, tensors) for named in slot.exported(tensor)]

    def _plan(self, weights: list[ExportedTensor], bucket_bytes: int) -> Iterator[list[_Slot]]:
        state, size = self._model.state_dict(), 0
        bucket: list[_Slot] = []
        for source, of_source in groupby(weights, key=lambda weight: weight.source):
            shape, dtype = state[source].shape, state[source].dtype
            rows_per_rank = -(-shape[0] // self._num_ranks) if shape else 1
            slot = _Slot(list(of_source), shape, self._dtype if dtype.is_floating_point else dtype, rows_per_rank)
            num_bytes = slot.numel * self._num_ranks * slot.dtype.itemsize
            if bucket and (size + num_bytes > bucket_bytes or slot.dtype != bucket[-1].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(slot)
            size += num_bytes
        yield bucket

    def _own(self, slots: list[_Slot], state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """With a single rank, nothing is copied that need not be."""
        return [self._own_rows(slot, state).to(self._device, slot.dtype) for slot in slots]

    def _gather(self, slots: list[_Slot], state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        dtype = slots[0].dtype
        own = torch.empty(sum(slot.numel for slot in slots), dtype=dtype, device=self._device)
        for slot, part in zip(slots, own.split([slot.numel for slot in slots])):
            rows = self._own_rows(slot, state)
            part[: rows.numel()].copy_(rows.reshape(-1))
        everyone = torch.empty(self._num_ranks, own.numel(), dtype=dtype, device=self._device)
        dist.all_gather_into_tensor(everyone.view(-1), own)
        parts = everyone.split([slot.numel for slot in slots], dim=1)
        return [part.reshape(-1)[: slot.shape.numel()].view(slot.shape) for slot, part in zip(slots, parts)]

    def _own_rows(self, slot: _Slot, state: dict[str, torch.Tensor]) -> torch.Tensor:
        weight = slot.weights[0]  # all have the tensor's adapter
        tensor, adapter = state[weight.source], weight.adapter
        if not tensor.shape:
            return to_local(tensor)
        start, end = shard_rows(tensor.shape[0], self._num_ranks, dist.get_rank())
        rows = to_local(tensor) if is_sharded(tensor) else to_local(tensor)[start:end]
        factors = {name: to_full(state[name]) for name in ((adapter.down, adapter.up) if adapter else ())}
        return merge_rows(adapter, rows, factors, start, end)
