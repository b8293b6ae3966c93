"""The way of the trained weights to an engine that keeps its own: whole tensors, a bucket of them at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from peft import PeftModel
from transformers import PreTrainedModel

from verl_ext.checkpoint.export import merged
from verl_ext.checkpoint.shards import is_sharded, local_part, shard_rows, whole
from verl_ext.checkpoint.weights import Weight, exported_weights

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _Slot:
    """Where a weight's rows lie in the flat tensor that each rank gives."""

    weight: Weight
    shape: torch.Size
    dtype: torch.dtype
    rows_per_rank: int

    @property
    def numel(self) -> int:
        """Elements of one rank's part, padding included."""
        return self.rows_per_rank * self.shape[1:].numel() if self.shape else 1

    @property
    def num_bytes(self) -> int:
        """Of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize


class WeightSource:
    """Gathers a sharded model's weights as its export has them, LoRA adapters merged, tied tensors once."""

    def __init__(self, model: PreTrainedModel | PeftModel, dtype: torch.dtype, device: str, bucket_bytes: int) -> None:
        """Plan the buckets.

        Args:
            model: as FSDP2 modules over all ranks.
            dtype: that the tensors are sent in; whole numbers stay what they are.
            device: of the sent tensors.
            bucket_bytes: a bucket is closed before it exceeds this, but holds at least one tensor.
        """
        self._model, self._dtype, self._device = model, dtype, device
        self._num_ranks = dist.get_world_size()
        self._buckets = list(self._planned(exported_weights(model), bucket_bytes))

    @property
    def num_bytes(self) -> int:
        """That an engine receives in all."""
        return sum(slot.num_bytes for bucket in self._buckets for slot in bucket)

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket]:
        """Names and whole tensors, which are valid until the next bucket; collective."""
        state = self._model.state_dict()
        for slots in self._buckets:
            yield self._gathered(slots, state) if self._num_ranks > 1 else self._own(slots, state)

    def _planned(self, weights: list[Weight], bucket_bytes: int) -> Iterator[list[_Slot]]:
        state, size = self._model.state_dict(), 0
        bucket: list[_Slot] = []
        for weight in weights:
            shape, dtype = state[weight.source].shape, state[weight.source].dtype
            rows_per_rank = -(-shape[0] // self._num_ranks) if shape else 1
            slot = _Slot(weight, shape, self._dtype if dtype.is_floating_point else dtype, rows_per_rank)
            num_bytes = slot.numel * self._num_ranks * slot.dtype.itemsize
            if bucket and (size + num_bytes > bucket_bytes or slot.dtype != bucket[-1].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(slot)
            size += num_bytes
        yield bucket

    def _own(self, slots: list[_Slot], state: dict[str, torch.Tensor]) -> Bucket:
        """Where there is no other rank: nothing is copied that need not be."""
        rows = [self._own_rows(slot, state) for slot in slots]
        return [(slot.weight.name, part.to(self._device, slot.dtype)) for slot, part in zip(slots, rows)]

    def _gathered(self, slots: list[_Slot], state: dict[str, torch.Tensor]) -> Bucket:
        dtype = slots[0].dtype
        own = torch.empty(sum(slot.numel for slot in slots), dtype=dtype, device=self._device)
        for slot, part in zip(slots, own.split([slot.numel for slot in slots])):
            rows = self._own_rows(slot, state)
            part[: rows.numel()].copy_(rows.reshape(-1))
        everyone = torch.empty(self._num_ranks, own.numel(), dtype=dtype, device=self._device)
        dist.all_gather_into_tensor(everyone.view(-1), own)
        parts = everyone.split([slot.numel for slot in slots], dim=1)
        return [(slot.weight.name, self._whole(slot, part)) for slot, part in zip(slots, parts)]

    def _own_rows(self, slot: _Slot, state: dict[str, torch.Tensor]) -> torch.Tensor:
        tensor, adapter = state[slot.weight.source], slot.weight.adapter
        if not tensor.shape:
            return local_part(tensor)
        start, end = shard_rows(tensor.shape[0], self._num_ranks, dist.get_rank())
        rows = local_part(tensor) if is_sharded(tensor) else local_part(tensor)[start:end]
        factors = {name: whole(state[name]) for name in ((adapter.down, adapter.up) if adapter else ())}
        return merged(slot.weight, rows, factors, start, end)

    def _whole(self, slot: _Slot, part: torch.Tensor) -> torch.Tensor:
        rows = part.reshape(-1)[: slot.shape.numel()]
        return rows.view(slot.shape)
