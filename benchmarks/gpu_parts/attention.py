"""The ragged attention kernels: decode to the copy bandwidth, and prefill to the matrix rate.

Every cell is checked against the float32 reference, on random inputs of its own and with NaN in what is allocated, at
the sizes at which it is then timed: a row depends on its own request alone, so that some rows tell of the kernel's way
through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from benchmarks.gpu_parts import ceilings
from benchmarks.gpu_parts.failures import FAILURES
from benchmarks.gpu_parts.floors import LARGE_KV, share, spread
from benchmarks.gpu_parts.jobs import Context
from benchmarks.gpu_parts.kernel_times import tell_kernels
from benchmarks.gpu_parts.measures import LONG_PREFILL
from benchmarks.gpu_parts.ragged_step import TINY, AttentionShape, RaggedStep, bytes_needed, make_step, ragged
from benchmarks.gpu_parts.rows import NO_TIME
from benchmarks.gpu_parts.step_check import check, nan_filled_outputs
from benchmarks.gpu_parts.timing import Timer, free_bytes
from selective_compile.kernels.one_step import one_step

Requests = tuple[tuple[int, int], ...]
LAYERS = 32  # of the 8B
SPARE = 2**31  # for what a kernel allocates, and the rows of the reference


def run(context: Context) -> None:
    parts = {"decode": decode, "prefill": prefill}
    parts[context.job.name](context)


def decode_cells(context: Context) -> Iterator[tuple[str, Requests]]:
    """Those first that say most, if the time should not do for all."""
    batches, lengths = (1, 8, 32, 128, 256), (4096, 512, 32_768)
    if context.quick:
        batches, lengths = (1, 32), (4096, 512)
    if context.tiny:
        batches, lengths = (1, 3), (40,)
    for length in lengths:
        for batch in batches:
            yield f"decode {batch} x {length}", ragged(batch, length)


def prefill_cells(context: Context) -> Iterator[tuple[str, Requests]]:
    lengths = (24,) if context.tiny else (1024, 4096) if context.quick else (1024, 2048, 4096, 8192, 16_384)
    for length in lengths:
        yield f"prefill {length}", ((length, length),)


def decode(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)
    large: list[float] = []

    def measure(name: str, step: RaggedStep) -> None:
        seconds, first, about = of_a_layer(step, timer, context.repeats)
        found = share(step.kv_bytes, seconds, best.bytes_per_second)
        counts = step.kv_bytes >= LARGE_KV or context.tiny
        if counts:
            large.append(found)
        figures = {"microseconds": 1e6 * seconds, "kv_bytes": step.kv_bytes, "share_of_copy": found, "counts": counts}
        figures |= {**about, "first_layer_microseconds": 1e6 * first}
        text = f"{1e6 * seconds:9.1f} us  {found:6.1%} of copy bandwidth{'' if counts else '  (below 64 MB)'}"
        text = f"{text}; {1e6 * first:.1f} us in the first layer"
        context.tell(context.job.row(name, figures=figures, text=text))

    each(context, decode_cells(context), measure)
    if (of_large := spread(large)) is not None:
        text = f"worst {of_large.worst:.1%}, worst over best {of_large.worst_over_best:.2f}, {len(large)} cells"
        figures = {"cells": len(large), **of_large._asdict()}
        context.tell(context.job.row("decode, 64 MB of keys and values or more", figures=figures, text=text))
    sizes = [(3, 40)] if context.tiny else [(1, 512), (32, 512), (8, 4096), (32, 4096), (1, 32_768)]
    tell_kernels(context, [(f"{batch} x {length}", ragged(batch, length)) for batch, length in sizes])


def of_a_layer(step: Callable[[], Any], timer: Timer, repeats: int) -> tuple[float, float, dict[str, Any]]:
    """Seconds of a layer of the 8B's step, in the mean, and of the first one, which alone shares out the keys; and how
    those of the others were timed."""
    first = timer.seconds(step, repeats)
    with one_step():  # the timer's first calls, before those that count, share them out
        other = timer.seconds(step, repeats)
    return (first + (LAYERS - 1) * other) / LAYERS, first, timer.about("layer_")


def prefill(context: Context) -> None:
    best, timer = ceilings.measured(context), Timer(context.device)

    def measure(name: str, step: RaggedStep) -> None:
        seconds = timer.seconds(step, context.repeats)
        rate, found = step.flops / seconds, share(step.flops, seconds, best.flops_per_second)
        counts = step.rows >= LONG_PREFILL or context.tiny
        figures = {
            "microseconds": 1e6 * seconds,
            "flops_per_second": rate,
            "share_of_product": found,
            "counts": counts,
            **timer.about(),
        }
        text = f"{1e6 * seconds:9.1f} us  {rate / 1e12:6.0f} TFLOP/s, {found:.1%} of product"
        context.tell(context.job.row(name, figures=figures, text=text))

    each(context, prefill_cells(context), measure)
    lengths = (24,) if context.tiny else (1024, 4096, 16_384)
    tell_kernels(context, [(str(length), ((length, length),)) for length in lengths])


Make = Callable[[Requests, AttentionShape, torch.device], RaggedStep]


def each(
    context: Context,
    cells: Iterable[tuple[str, Requests]],
    measure: Callable[[str, RaggedStep], None],
    *,
    shape: AttentionShape | None = None,
    make: Make = make_step,
) -> None:
    """Make, check and measure one cell after another; one that fails or does not fit is named, and the next goes on."""
    shape = TINY if context.tiny else shape or AttentionShape()
    for name, requests in cells:
        if name in context.job.done:
            continue
        if context.seconds_left < 0:
            context.fail(name, NO_TIME)
            continue
        try:
            _cell(context, name, requests, measure, shape, make)
        except FAILURES as error:
            context.failed(name, error)


def _cell(
    context: Context,
    name: str,
    requests: Requests,
    measure: Callable[[str, RaggedStep], None],
    shape: AttentionShape,
    make: Make,
) -> None:
    needed, free = bytes_needed(requests, shape) + SPARE * (not context.tiny), free_bytes(context.device)
    if needed > free:
        context.skip(name, f"needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    step = make(requests, shape, context.device)
    with nan_filled_outputs():
        output = step()
    check(step, output)
    measure(name, step)
