"""Large tensors of zeros in huge pages of the CPU's memory.

Keys and values of a request lie in blocks all over the pools. In pages of 4 KiB, each block asks for translations of
addresses that no cache holds; in pages of 2 MiB, a few hundred translations serve a whole pool. Decode attention over
8k tokens read 3 to 30 % faster (benchmarks/cpu_attention.py with such pools and without, two threads of a Zen 4).
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2**21  # bytes; what is smaller gains nothing


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros of this shape in the CPU's memory, in huge pages where the system gives them. Nothing is touched yet."""
    size = math.prod(shape) * dtype.itemsize
    memory = _advised(size) if size >= HUGE_PAGE else None
    if memory is None:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)


def _advised(size: int) -> mmap.mmap | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # Linux has it
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without them; or too little memory, of which torch says how much was asked for
        return None
    return memory
