"""Copies of a model's and an optimizer's state in CPU memory, from which a thread writes a checkpoint."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from verl_ext.checkpoint.save import local_tensors
from verl_ext.console import warn
from verl_ext.files import format_bytes


class CpuStager:
    """Copies nested state to CPU memory, so that training continues during a save. The next copy reuses the memory."""

    def __init__(self) -> None:
        self._memory = HostMemory(0, is_pinned=False)
        self._used = 0
        self._copies: dict[tuple[int, torch.Size], torch.Tensor] = {}

    @torch.no_grad()
    def stage(self, state: Any) -> Any:
        """Copy `state` with its tensors in CPU memory, overwriting the previous copy.

        Args:
            state: nested dictionaries, lists and tuples; only tensors are copied.
        """
        tensors = {_identity_of(tensor): tensor for tensor in local_tensors(state)}.values()
        num_bytes = sum(_aligned(tensor.nbytes) for tensor in tensors)
        if num_bytes > self._memory.num_bytes:
            self._memory.release()
            self._memory = HostMemory(num_bytes, is_pinned=any(tensor.is_cuda for tensor in tensors))
        self._used, self._copies = 0, {}
        copy = self._copy(state)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from the device are asynchronous
        return copy

    def _copy(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            # not from_local, which would move the copy back to the mesh's device
            return DTensor(self._copy_tensor(value._local_tensor), value._spec, requires_grad=False)
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, dict):
            return {key: self._copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._copy, value))
        return value

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if (source := _identity_of(tensor)) not in self._copies:  # tied weights remain one tensor
            copy = self._memory.tensor(self._used, tensor.shape, tensor.dtype)
            self._copies[source] = copy.copy_(tensor, non_blocking=tensor.is_cuda)
            self._used += _aligned(tensor.nbytes)
        return self._copies[source]


class HostMemory:
    """One block of CPU memory for tensors, whose storages are parts of it.

    PyTorch rounds each pinned tensor up to a power of two, which nearly doubles a large state. This block has exactly
    the given size.
    """

    def __init__(self, num_bytes: int, is_pinned: bool) -> None:
        """Reserve memory, and pin it for copies from a GPU; without permission to pin, copies are slower.

        Args:
            num_bytes: size of the block.
            is_pinned: whether to pin it.
        """
        self.num_bytes = num_bytes
        self._block = mmap.mmap(-1, num_bytes) if num_bytes else b""
        self._is_pinned = False
        if is_pinned and num_bytes:
            code = int(torch.cuda.cudart().cudaHostRegister(self._address, num_bytes, 1))
            self._is_pinned = code == 0
            if code:
                clear_gpu_error()  # or the next kernel launch would raise it
                warn(f"{format_bytes(num_bytes)} of memory cannot be pinned (CUDA error {code}), so saves block longer")

    def tensor(self, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor at an offset in bytes, with a storage of its own size."""
        return torch.frombuffer(self._block, dtype=dtype, count=shape.numel(), offset=offset).view(shape)

    def release(self) -> None:
        """Unpin the block; the memory is freed with its last tensor."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._address)
            self._is_pinned = False

    @property
    def _address(self) -> int:
        return self.tensor(0, torch.Size([1]), torch.uint8).data_ptr()


def clear_gpu_error() -> int:
    """Clear the last error of the CUDA or HIP runtime, and return its code; `torch.cuda.cudart` lacks this function."""
    libraries = ctypes.CDLL(torch._C.__file__)  # also finds functions of the libraries that it depends on
    return int((libraries.hipGetLastError if torch.version.hip else libraries.cudaGetLastError)())


def _identity_of(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _aligned(num_bytes: int) -> int:
    """Round up to a cache line, which is a multiple of the size of every dtype."""
    return -(-num_bytes // 64) * 64
