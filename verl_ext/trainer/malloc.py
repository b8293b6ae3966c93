"""How glibc's malloc treats the tensors of a training step on a CPU."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from <malloc.h>
TOP_PAD_BYTES = 64 << 20
LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> None:
    """Have freed memory be used again instead of being given back to the kernel.

    As shipped, malloc maps each block of more than 32 MiB anew, and the kernel fills every page of it with zeros: at
    every micro-batch, for every activation of that size. Does nothing where the C library is another.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)
        mallopt(M_TOP_PAD, TOP_PAD_BYTES)
