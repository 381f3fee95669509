"""The ragged attention kernels: decode to the copy bandwidth, and prefill to the matrix rate.

Every cell is checked against the float32 reference, on random inputs of its own and with NaN in what is allocated, at
the sizes at which it is then timed: a row depends on its own request alone, so that some rows tell of the kernel's way
through all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

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
BEHIND_ANOTHER = 8  # of them, at most, that are timed as they come one behind another
OF_NO_CACHE = 1e9  # bytes
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
    by_itself: list[float] = []

    def measure(name: str, step: RaggedStep) -> None:
        times, about = of_a_layer(layers_like(step), timer, context.repeats)
        found, alone = (share(step.kv_bytes, each, best.bytes_per_second) for each in (times.mean, times.alone))
        counts = step.kv_bytes >= LARGE_KV or context.tiny
        if counts:
            large.append(found)
            by_itself.append(alone)
        figures = {"microseconds": 1e6 * times.mean, "kv_bytes": step.kv_bytes, **about}
        for which in ("behind", "alone", "first"):
            figures[f"{which}_microseconds"] = 1e6 * getattr(times, which)
        figures |= {"share_of_copy": found, "alone_share_of_copy": alone, "counts": counts}
        text = f"{1e6 * times.mean:9.1f} us  {found:6.1%} of copy bandwidth{'' if counts else '  (below 64 MB)'}"
        context.tell(context.job.row(name, figures=figures, text=f"{text}; {1e6 * times.alone:.1f} us by itself"))

    each(context, decode_cells(context), measure)
    if (of_large := spread(large)) is not None and (alone := spread(by_itself)) is not None:
        text = f"worst {of_large.worst:.1%}, worst over best {of_large.worst_over_best:.2f}, {len(large)} cells"
        text = f"{text}; by itself {alone.worst:.1%} and {alone.worst_over_best:.2f}"
        figures = {
            "cells": len(large),
            **of_large._asdict(),
            **{f"alone_{of}": part for of, part in alone._asdict().items()},
        }
        context.tell(context.job.row("decode, 64 MB of keys and values or more", figures=figures, text=text))
    sizes = [(3, 40)] if context.tiny else [(1, 512), (32, 512), (8, 4096), (32, 4096), (1, 32_768)]
    tell_kernels(context, [(f"{batch} x {length}", ragged(batch, length)) for batch, length in sizes])


class LayerTimes(NamedTuple):
    """Seconds of a layer's attention in a step of the 8B.

    Attributes:
        mean: of all layers, of which the first one alone shares out the keys.
        behind: of one behind another.
        alone: of one by itself, between two moments.
        first: of one that shares out the keys, by itself.
    """

    mean: float
    behind: float
    alone: float
    first: float


def layers_like(step: RaggedStep) -> list[RaggedStep]:
    """Layers of one step: as many as the device has room for, but each has keys and values of its own, so that none
    finds any in a cache. Those that no cache holds are read again."""
    if step.kv_bytes > OF_NO_CACHE:
        return [step] * 2
    needed = bytes_needed(step.requests, step.shape)
    count = max(2, min(BEHIND_ANOTHER, 1 + (free_bytes(step.query.device) - SPARE) // needed))
    others = [make_step(step.requests, step.shape, step.query.device) for _ in range(count - 1)]
    return [step, *(replace(other, **step.lengths) for other in others)]


def of_a_layer(layers: Sequence[Callable[[], Any]], timer: Timer, repeats: int) -> tuple[LayerTimes, dict[str, Any]]:
    """And how those of layers one behind another were timed."""

    def one_behind_another() -> None:
        for layer in layers:
            layer()

    first = timer.seconds(layers[0], repeats)
    with one_step():  # the timer's first calls, before those that count, share out the keys
        alone = timer.seconds(layers[0], repeats)
        behind = timer.seconds(one_behind_another, repeats) / len(layers)
    mean = behind + max(0.0, first - alone) / LAYERS
    return LayerTimes(mean, behind, alone, first), timer.about("layers_")


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
