"""What it costs that one kernel comes behind another, in a captured graph, where the host has no part in it.

Kernels that do next to nothing, each of which needs what the one in front of it wrote, as those of a layer do; begun
when that is complete, or early, where it gives leave at its beginning or at its end (`dependent_launch`). And a copy of
as many bytes as the smallest cells of decoding that count, to say what a device reaches in so short a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from benchmarks.gpu_parts.floors import LARGE_KV
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.timing import Timer
from selective_compile.kernels.dependent_launch import begins_early, launch_options
from selective_compile.kernels.interpreter import on_device

LAUNCHES = 64  # of a call: what its first and its last launch cost beside the clock is little of it
PROGRAMS = 128
TINY = (2, 3)  # launches and programs of a dry run


@triton.jit
def _counting_kernel(counts, PDL: tl.constexpr, AT_ONCE: tl.constexpr):
    """Adds one to what the kernel in front has left of the program's number."""
    at = counts + tl.program_id(0)
    if PDL:
        gdc_wait()
    if PDL and AT_ONCE:
        gdc_launch_dependents()
    count = tl.load(at)
    tl.store(at, count + 1)
    if PDL and not AT_ONCE:
        gdc_launch_dependents()


def tell(context: Context, timer: Timer) -> None:
    """Rows of both; none of them has a bar."""
    ways = {"when that is complete": (False, False)}
    if begins_early(context.device):
        ways |= {"early, from its end on": (True, False), "early, from its beginning on": (True, True)}
    for way, (early, at_once) in ways.items():
        seconds = seconds_of_a_launch(context, timer, early=early, at_once=at_once)
        figures = {"microseconds": 1e6 * seconds, **timer.about()}
        text = f"{1e6 * seconds:9.2f} us a launch in a graph"
        context.tell(context.job.row(f"a kernel behind another, {way}", figures=figures, text=text))
    seconds = seconds_of_a_short_copy(context, timer)
    text = f"{1e6 * seconds:9.1f} us, {LARGE_KV / seconds / 1e12:.2f} TB/s, by a kernel in a graph"
    figures = {"microseconds": 1e6 * seconds, **timer.about()}
    context.tell(context.job.row(f"copy of {LARGE_KV / 1e6:.0f} MB, read and written", figures=figures, text=text))


def seconds_of_a_launch(context: Context, timer: Timer, *, early: bool, at_once: bool) -> float:
    """
    Raises:
        ValueError: a kernel began before what it needs was there.
    """
    launches, programs = TINY if context.tiny else (LAUNCHES, PROGRAMS)
    counts = torch.zeros(programs, dtype=torch.int32, device=context.device)
    kernel, options = on_device(_counting_kernel, counts), launch_options(early)

    def call() -> None:
        counts.zero_()
        for _ in range(launches):
            kernel[(programs,)](counts, early, at_once, num_warps=4, **options)

    seconds = timer.seconds(call, context.repeats) / launches
    if not torch.equal(counts, torch.full_like(counts, launches)):
        raise ValueError(f"each program must count {launches} launches, got {counts.tolist()}")
    return seconds


def seconds_of_a_short_copy(context: Context, timer: Timer) -> float:
    size = 2**10 if context.tiny else int(LARGE_KV) // 8
    source = torch.randint(256, (size,), dtype=torch.int32, device=context.device)
    target = torch.empty_like(source)
    return timer.seconds(lambda: torch.bitwise_or(source, 0, out=target), context.repeats)
