"""Copies a rank's state into CPU memory, so that training can go on while the copy is written."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor


class Stager:
    """Copies nested state; the memory of one copy serves for the next."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self._seen: dict[tuple[int, torch.Size], torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, state: Any) -> Any:
        """A copy of `state` whose tensors lie in CPU memory; the former copy is overwritten.

        Args:
            state: dictionaries, lists and tuples of anything; what is no tensor is taken over as it is.
        """
        self._seen.clear()
        copy = self._copy(state, ())
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies from the device were only queued
        return copy

    def _copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, DTensor):
            # The constructor, because from_local would move the copy back to the mesh's device.
            return DTensor(self._copy_tensor(value._local_tensor, path), value._spec, requires_grad=False)
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value, path)
        if isinstance(value, dict):
            return {key: self._copy(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, (*path, index)) for index, item in enumerate(value))
        return value

    def _copy_tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> torch.Tensor:
        source = (tensor.data_ptr(), tensor.shape)
        if source in self._seen:  # tied weights stay one tensor
            return self._seen[source]
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._buffers[path] = buffer
        if tensor.numel():
            self._seen[source] = buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)
