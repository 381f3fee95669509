"""What the machine can do at best: bytes read and multiplications done in a second."""

from __future__ import annotations

import ctypes
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selective_compile.kernels import native

MATRIX = 2048
TURNS = 5
_MULTIPLICATIONS = {torch.float32: 1, torch.bfloat16: 2}  # kinds of the native function
_READ = 0


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured with the threads of the run, on one large read and on multiplications of one dtype."""

    bytes_per_second: float
    flops_per_second: float

    def best(self, other: Ceilings) -> Ceilings:
        """Of each the larger: what the machine did once, it can do."""
        return Ceilings(
            bytes_per_second=max(self.bytes_per_second, other.bytes_per_second),
            flops_per_second=max(self.flops_per_second, other.flops_per_second),
        )


def measure_ceilings(dtype: torch.dtype, *, device: torch.device, read_bytes: int) -> Ceilings:
    """The best of what was tried; each a median of several turns.

    Reads of `read_bytes`: torch's sum, and on a CPU a native loop. Multiplications: torch's square matrix product in
    `dtype`, and on a CPU a native loop over registers, which no kernel that also loads its operands can exceed.
    """
    small = read_bytes < 2**28  # a quick run
    large = torch.ones(read_bytes // 4, dtype=torch.float32, device=device)
    reads = [large.nbytes / median_seconds(large.sum, device)]
    side = MATRIX // 8 if small else MATRIX
    left, right = (torch.randn(side, side, dtype=torch.float32, device=device).to(dtype) for _ in range(2))
    products = [2 * side**3 / median_seconds(lambda: left @ right, device)]
    if device.type == "cpu" and (native_work := _native()) is not None:
        reads.append(native_rate(native_work, _READ, large.nbytes, large.data_ptr()))
        if dtype in _MULTIPLICATIONS:
            products.append(native_rate(native_work, _MULTIPLICATIONS[dtype], 10**5 if small else 2 * 10**7))
    return Ceilings(bytes_per_second=max(reads), flops_per_second=max(products))


def native_rate(work: Callable[..., int], kind: int, size: int, address: int = 0) -> float:
    """Units of work a second of `selective_ceiling` in ceilings_cpu.cpp, on all of torch's threads."""
    call = functools.partial(work, kind, address, size, torch.get_num_threads(), native.torch_parallel())
    return call() / median_seconds(call, torch.device("cpu"))


def median_seconds(work: Callable[[], Any], device: torch.device) -> float:
    work()  # warms up
    return statistics.median(turn_seconds(work, device))


def turn_seconds(work: Callable[[], Any], device: torch.device) -> Iterator[float]:
    for _ in range(TURNS):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        yield time.perf_counter() - begin


def read_blocks(blocks: Tensor, order: Tensor) -> None:
    """Read those of the blocks [num_blocks, ...] that `order`, int32, lists, in that order, on all of torch's threads.

    Raises:
        NativeBuildError: there is no compiler.
        ValueError: the blocks do not lie one behind the other, or are no multiple of 64 bytes; or there is none that
            `order` lists.
    """
    size = blocks[0].nbytes
    if not blocks.is_contiguous() or size % 64:
        raise ValueError(
            f"blocks must be contiguous, of a multiple of 64 bytes, got strides {blocks.stride()}, {size} bytes"
        )
    if order.dtype is not torch.int32 or not order.is_contiguous():
        raise ValueError(f"order must be int32, one behind the other, got {order.dtype}, strides {order.stride()}")
    if len(order) and not 0 <= int(order.min()) <= int(order.max()) < len(blocks):
        raise ValueError(f"order must be of the {len(blocks)} blocks, got {int(order.min())} to {int(order.max())}")
    function: Any = _library().selective_read_blocks
    function.argtypes, function.restype = [ctypes.c_int64] * 6, None
    threads = torch.get_num_threads()
    function(blocks.data_ptr(), order.data_ptr(), len(order), size, threads, native.torch_parallel())


@functools.cache
def _native() -> Callable[..., int] | None:
    """None where it cannot be built; `native.load` says why in the log of the kernels, which need a compiler too."""
    try:
        function: Any = _library().selective_ceiling
    except native.NativeBuildError:
        return None
    function.argtypes = [ctypes.c_int64] * 5
    function.restype = ctypes.c_int64
    return function


@functools.cache
def _library() -> ctypes.CDLL:
    return native.load(Path(__file__).with_name("ceilings_cpu.cpp"))
