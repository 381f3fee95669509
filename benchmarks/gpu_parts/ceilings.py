"""What the device can do at best: bytes copied and bfloat16 multiplications, each a median on random data."""

from __future__ import annotations

import torch

from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.timing import Timer


def run(context: Context) -> None:
    """Rows "copy" and "bf16 product", from which the other parts have their `Ceilings`."""
    timer = Timer(context.device)
    copied = copy_rate(context, timer)
    _tell(context, "copy", "bytes_per_second", copied, f"{copied / 1e12:.2f} TB/s, read and written")
    multiplied = product_rate(context, timer)
    _tell(context, "bf16 product", "flops_per_second", multiplied, f"{multiplied / 1e12:.0f} TFLOP/s")


def _tell(context: Context, name: str, unit: str, rate: float, text: str) -> None:
    context.tell(context.job.row(name, figures={unit: rate}, text=text))


def measured(context: Context) -> Ceilings:
    """Those the run has already measured, or measured now."""
    if context.ceilings is not None:
        return context.ceilings
    timer = Timer(context.device)
    return Ceilings(copy_rate(context, timer), product_rate(context, timer))


def copy_rate(context: Context, timer: Timer) -> float:
    """Bytes read and written in a second, of random buffers far larger than any cache."""
    size = 2**16 if context.tiny else 2**31
    source = torch.randint(256, (size,), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.seconds(lambda: target.copy_(source), context.repeats)


def product_rate(context: Context, timer: Timer) -> float:
    """Operations in a second of a square product; random numbers, since zeros cost a device less power and time."""
    side = 64 if context.tiny else 8192
    left, right = (torch.randn(side, side, device=context.device, dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    return 2 * side**3 / timer.seconds(lambda: torch.mm(left, right, out=result), context.repeats)
