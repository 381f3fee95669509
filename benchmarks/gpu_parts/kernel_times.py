"""How long each kernel of a layer takes, by torch's profiler: the launches of one cell apart.

Beside the time of a cell, which is of all of them in a graph, with what lies between two of them. Here they are
launched one by one, find in the cache what the call before left there, and have the profiler beside them.  One that
begins early is there while it waits for the one in front of it: that is in its time, too, most of all in the merge's.
"""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.profiled import medians, on_device
from benchmarks.gpu_parts.ragged_step import TINY, AttentionShape, make_step
from benchmarks.gpu_parts.rows import ALL_TIMED, NO_TIME
from selective_compile.kernels.one_step import one_step

CALLS = 6
SECONDS = 3.0  # for all cells; with less, none is begun


def tell_kernels(context: Context, cells: Iterable[tuple[str, tuple[tuple[int, int], ...]]]) -> None:
    """A row of all these cells, which were computed before, so that their kernels are compiled."""
    context.tell(context.job.row(f"{context.job.name}: {ALL_TIMED}", text="what follows is of torch's profiler"))
    name = f"{context.job.name}: kernels"
    if name in context.job.done:
        return
    if context.seconds_left < SECONDS:
        context.skip(name, NO_TIME)
        return
    found: dict[str, dict[str, float]] = {}
    try:
        for cell, requests in cells:
            if of_cell := kernels_of(context, requests):
                found[cell] = of_cell
    except FAILURES as error:
        context.failed(name, error)
        return
    if not found:
        context.skip(name, "the profiler saw nothing of the device")
        return
    text = "; ".join(f"{cell}: {_in_words(kernels)}" for cell, kernels in found.items())
    context.tell(context.job.row(name, figures={"microseconds": found}, text=f"{text} us"))


def kernels_of(context: Context, requests: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """Median microseconds of each kernel of a layer, not the first one, which alone shares out the keys."""
    step = make_step(requests, TINY if context.tiny else AttentionShape(), context.device)
    with one_step():
        step()
        ran, _ = on_device(lambda: [step() for _ in range(1 if context.tiny else CALLS)])
    return medians(ran)


def _in_words(kernels: dict[str, float]) -> str:
    return ", ".join(f"{name.strip('_').removesuffix('_kernel')[:24]} {took:.1f}" for name, took in kernels.items())
