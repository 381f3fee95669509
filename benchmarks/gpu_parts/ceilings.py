"""What the device can do at best: bytes copied and bfloat16 multiplications, each a median on random data.

A copy is made in several plain ways, and the fastest is the ceiling. Captured in a graph, `copy_` is a node that copies
memory, which reached 2.7 TB/s on an H200, where the same copy had 4.3 when it was launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_parts import launches
from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.floors import Ceilings
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.timing import Timer


def run(context: Context) -> None:
    """Rows "copy" and "bf16 product", from which the other parts have their `Ceilings`, and what a launch costs; at the
    end of a run the first two once more, beside those of its beginning: a device that grows warm multiplies more
    slowly."""
    timer = Timer(context.device)
    if context.device.type == "cuda" and context.job.part == "ceilings":
        _tell_device(context)
    first = context.ceilings
    copied = best_copy(context, timer)
    text = f"{copied.rate / 1e12:.2f} TB/s, read and written, by {copied.way}"
    figures = {"bytes_per_second": copied.rate, "way": copied.way, "ways": copied.rates, **copied.about}
    _tell(context, "copy", figures, text, first and copied.rate / first.bytes_per_second)
    multiplied = product_rate(context, timer)
    text = f"{multiplied / 1e12:.0f} TFLOP/s"
    over_first = first and multiplied / first.flops_per_second
    _tell(context, "bf16 product", {"flops_per_second": multiplied, **timer.about()}, text, over_first)
    if context.job.part == "ceilings":
        try:
            launches.tell(context, timer)
        except FAILURES as error:
            context.failed("launches", error)


def _tell(context: Context, name: str, figures: dict[str, Any], text: str, over_first: float | None) -> None:
    if over_first is not None:
        figures = {**figures, "over_first": over_first}
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
    return Ceilings(best_copy(context, timer).rate, product_rate(context, timer))


class Copied(NamedTuple):
    """The fastest way to copy: its bytes in a second, read and written, how it was timed, and the rates of all."""

    way: str
    rate: float
    about: dict[str, Any]
    rates: dict[str, float]


def best_copy(context: Context, timer: Timer) -> Copied:
    """Of random buffers far larger than any cache."""
    size = 2**16 if context.tiny else 2**31
    source = torch.randint(256, (size,), dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    found = []
    for way, (copy, launched) in ways_to_copy(source, target).items():
        rate = 2 * source.nbytes / timer.seconds(copy, context.repeats, launched=launched)
        found.append((rate, way, timer.about()))
    rate, way, about = max(found, key=lambda each: each[0])
    return Copied(way, rate, about, {way: rate for rate, way, _ in found})


def ways_to_copy(source: torch.Tensor, target: torch.Tensor) -> dict[str, tuple[Callable[[], Any], bool]]:
    """By name; and whether it is to be launched, and not captured. The kernel is that of an operator which leaves
    integers as they are, and reads and writes 16 bytes at once."""
    numbers, copies = source.view(torch.int32), target.view(torch.int32)
    return {
        "copy_ in a graph": (lambda: target.copy_(source), False),
        "copy_ launched": (lambda: target.copy_(source), True),
        "a kernel in a graph": (lambda: torch.bitwise_or(numbers, 0, out=copies), False),
    }


def product_rate(context: Context, timer: Timer) -> float:
    """Operations in a second of a square product; random numbers, since zeros cost a device less power and time."""
    side = 64 if context.tiny else 8192
    left, right = (torch.randn(side, side, device=context.device, dtype=torch.bfloat16) for _ in range(2))
    result = torch.empty_like(left)
    return 2 * side**3 / timer.seconds(lambda: torch.mm(left, right, out=result), context.repeats)
