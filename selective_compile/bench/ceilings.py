"""What the machine can do at best: bytes read and multiplications done in a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MATRIX = 2048
TURNS = 5


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Measured on one dtype's matrix product and one large read, with the threads of the run."""

    bytes_per_second: float
    flops_per_second: float


def measure_ceilings(dtype: torch.dtype, *, device: torch.device, read_bytes: int) -> Ceilings:
    """Medians of several turns: a sum over `read_bytes` of float32, and a square product in `dtype`."""
    side = MATRIX if read_bytes >= 2**28 else MATRIX // 8
    large = torch.ones(read_bytes // 4, device=device)
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return Ceilings(
        bytes_per_second=large.nbytes / median_seconds(large.sum, device),
        flops_per_second=2 * side**3 / median_seconds(lambda: left @ right, device),
    )


def median_seconds(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    seconds = []
    for turn in range(TURNS + 1):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn:  # the first one warms up
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
