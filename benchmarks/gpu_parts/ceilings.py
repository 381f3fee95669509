"""What the device can do at best: bytes copied and bfloat16 multiplications, each a median on random data."""

from __future__ import annotations

import torch

from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.timing import Timer


def run(context: Context) -> None:
    """Rows "copy" and "bf16 product", from which the other parts have their `Ceilings`; at the end of a run once more,
    beside those of its beginning: a device that grows warm multiplies more slowly."""
    timer = Timer(context.device)
    if context.device.type == "cuda" and context.job.part == "ceilings":
        _tell_device(context)
    first = context.ceilings
    copied = copy_rate(context, timer)
    text = f"{copied / 1e12:.2f} TB/s, read and written"
    _tell(context, timer, "copy", {"bytes_per_second": copied}, text, first and copied / first.bytes_per_second)
    multiplied = product_rate(context, timer)
    text = f"{multiplied / 1e12:.0f} TFLOP/s"
    over_first = first and multiplied / first.flops_per_second
    _tell(context, timer, "bf16 product", {"flops_per_second": multiplied}, text, over_first)


def _tell(
    context: Context, timer: Timer, name: str, rate: dict[str, float], text: str, over_first: float | None
) -> None:
    figures = {**rate, **timer.about()}
    if over_first is not None:
        figures["over_first"] = over_first
        text = f"{text}, {over_first:.3f} of what it was at first"
    context.tell(context.job.row(name, figures=figures, text=text))


def _tell_device(context: Context) -> None:
    about = torch.cuda.get_device_properties(context.device)
    figures = {
        "device": about.name,
        "memory_bytes": about.total_memory,
        "processors": about.multi_processor_count,
        "capability": [about.major, about.minor],
        "cache_bytes": getattr(about, "L2_cache_size", None),  # not of every kind of device
        "cuda": torch.version.cuda,
    }
    text = f"{about.name}, {about.total_memory / 1e9:.0f} GB, {about.multi_processor_count} processors"
    context.tell(context.job.row("device", figures=figures, text=f"{text}, CUDA {torch.version.cuda}"))


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
